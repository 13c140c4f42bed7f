//! The Jinja template that comes with a model: it is run here, on a conversation's messages and variables.
//!
//! A template is a program from a file, so it runs under limits: its work, the memory it takes and its depth are bounded.
//! One hole is known: the template library (minijinja 3.1) does not charge for what a list holds when it is joined with
//! itself (`x = x + x`) or printed after it was nested in itself (`x = [x, x]`). A template that does either some forty
//! times is not stopped.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::chat::Conversation;
use crate::error::{ModelError, Result};

/// Longest template, bytes.
pub(crate) const MAX_TEMPLATE: usize = 1 << 20;
/// Longest JSON that `tojson` makes, bytes.
const MAX_JSON: usize = 16 << 20;
/// Fuel (instructions, and a unit for every 64 bytes made) of a template without messages: at most 64 MB.
const BASE_FUEL: u64 = 1_000_000;
/// More fuel for every message.
const MESSAGE_FUEL: u64 = 10_000;

/// A template and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct ChatTemplate {
    path: PathBuf,
    name: String,
    source: String,
}

/// Texts of the special tokens that templates refer to.
#[derive(Clone, Debug, Default)]
pub(crate) struct TemplateTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub pad: Option<String>,
    pub unk: Option<String>,
}

impl ChatTemplate {
    /// A template; it is parsed when it is used, so that a model whose template is broken still runs plain prompts.
    pub fn new(path: &Path, name: &str, source: &str) -> ChatTemplate {
        ChatTemplate { path: path.to_path_buf(), name: name.into(), source: source.into() }
    }

    /// The text of a conversation.
    pub fn render(&self, conversation: &Conversation, tokens: &TemplateTokens) -> Result<String> {
        if self.source.len() > MAX_TEMPLATE {
            return Err(self.fault(None, format!("longer than {MAX_TEMPLATE} bytes")));
        }
        let fuel = BASE_FUEL + MESSAGE_FUEL * conversation.messages.len() as u64 + conversation.bytes() as u64;
        let source = without_generation_marks(&self.source);
        self.run(&source, conversation, tokens, fuel).map_err(|e| {
            let what = match e.kind() {
                ErrorKind::OutOfFuel => format!("more work or more text than {fuel} units allow"),
                kind => e.detail().map_or_else(|| kind.to_string(), |detail| format!("{kind}: {detail}")),
            };
            self.fault(e.line(), what)
        })
    }

    fn run(
        &self,
        source: &str,
        conversation: &Conversation,
        tokens: &TemplateTokens,
        fuel: u64,
    ) -> std::result::Result<String, Error> {
        let mut env = Environment::new();
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(write_as_python);
        env.set_fuel(Some(fuel));
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> std::result::Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", strftime_now);
        let text = |token: &Option<String>| token.as_ref().map_or(Value::UNDEFINED, Value::from);
        let messages: Vec<Value> = conversation.messages.iter().map(|m| Value::from_pairs(m.iter().cloned())).collect();
        let mut context: Vec<(String, Value)> = vec![
            ("messages".into(), Value::from(messages)),
            ("tools".into(), Value::from(())),
            ("documents".into(), Value::from(())),
            ("add_generation_prompt".into(), Value::from(conversation.generation_prompt)),
            ("bos_token".into(), text(&tokens.bos)),
            ("eos_token".into(), text(&tokens.eos)),
            ("pad_token".into(), text(&tokens.pad)),
            ("unk_token".into(), text(&tokens.unk)),
        ];
        for (name, value) in &conversation.variables {
            context.retain(|(known, _)| known != name);
            context.push((name.clone(), value.clone()));
        }
        let context = Value::from_pairs(context);
        env.template_from_named_str(&self.name, source)?.render(context)
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Variables that the template reads and doesn't set itself; none if it doesn't parse, which rendering it will tell.
    pub fn variables(&self) -> HashSet<String> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        if let Ok(syntax) = syntax {
            env.set_syntax(syntax);
        }
        let source = without_generation_marks(&self.source);
        env.template_from_named_str(&self.name, &source).map(|t| t.undeclared_variables(false)).unwrap_or_default()
    }

    /// A fault of the template, at a line if one is known.
    pub fn fault(&self, line: Option<usize>, what: String) -> ModelError {
        ModelError::Template { path: self.path.clone(), template: self.name.clone(), line, what }
    }
}

/// Templates may mark what the model said, `{% generation %}...{% endgeneration %}`, for training. The marks say nothing
/// about the text; blocks that are always taken stand in for them.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let inside = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match inside {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Writes constants as Python does.
fn write_as_python(out: &mut Output, state: &mut State, value: &Value) -> std::result::Result<(), Error> {
    let constant = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(constant).map_err(Error::from)
}

/// JSON as Python writes it: spaces after colons and commas, no HTML escapes.
fn tojson(state: &State, value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: ensure_ascii is not supported"));
    }
    options.assert_all_used()?;
    let wrong = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}"));
    let mut out = Limited(Vec::new());
    match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(64));
            let format = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, format)).map_err(wrong)?;
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonJson)).map_err(wrong)?,
    }
    state.consume_fuel((out.0.len() / 64) as u64)?;
    String::from_utf8(out.0).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// Bytes up to [`MAX_JSON`].
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_JSON {
            return Err(std::io::Error::other("too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct PythonJson;

impl Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// The time of day where the program runs, in the format of C's `strftime`.
fn strftime_now(format: &str) -> std::result::Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}
