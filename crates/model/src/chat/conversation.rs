//! The messages of a conversation and the variables that go to the template with them, checked.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::template::ChatTemplate;
use crate::error::{ModelError, Result};

/// Names that a caller can't give to a template.
const RESERVED: [&str; 6] = ["messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"];
/// Fields that a template need not print: which call a result belongs to follows from the order as well.
const MAY_BE_LEFT_OUT: [&str; 3] = ["role", "content", "tool_call_id"];

/// One message of a conversation that consists of text alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl ChatMessage {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into() }
    }
}

/// What a template is run on.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Fields of each message, in the caller's order.
    pub(crate) messages: Vec<Vec<(String, Value)>>,
    /// Further variables of the template: `tools`, `enable_thinking` and the like.
    pub(crate) variables: Vec<(String, Value)>,
    /// True if the text is to end where the model's answer starts.
    pub(crate) generation_prompt: bool,
}

fn wrong(what: String) -> ModelError {
    ModelError::Conversation { what }
}

fn pairs(map: &Value) -> Vec<(String, Value)> {
    let keys = map.try_iter().into_iter().flatten();
    keys.filter_map(|key| Some((key.as_str()?.to_owned(), map.get_item(&key).ok()?))).collect()
}

impl Conversation {
    /// A conversation of texts.
    pub fn new(messages: &[ChatMessage], generation_prompt: bool) -> Conversation {
        let fields = |m: &ChatMessage| {
            vec![("role".into(), Value::from(m.role.as_str())), ("content".into(), Value::from(m.content.as_str()))]
        };
        Conversation { messages: messages.iter().map(fields).collect(), variables: Vec::new(), generation_prompt }
    }

    /// A conversation from JSON: a list of messages in the form of OpenAI's chat interface, and an object of variables.
    ///
    /// Text parts of a content are put together, and arguments of tool calls that are JSON texts become objects, as templates
    /// expect them. Fields that are null count as absent, but for `content`.
    ///
    /// # Errors
    /// `Conversation` for messages that are none, naming the place.
    pub fn from_json(messages: &str, variables: &str, generation_prompt: bool) -> Result<Conversation> {
        let read = |name: &str, text: &str| -> Result<Value> {
            serde_json::from_str(text).map_err(|e| wrong(format!("{name}: not JSON: {e}")))
        };
        let (messages, variables) = (read("messages", messages)?, pairs(&read("variables", variables)?));
        if messages.kind() != ValueKind::Seq {
            return Err(wrong("messages: must be a list of messages".into()));
        }
        if let Some((name, _)) = variables.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
            return Err(wrong(format!("{name}: the template gets this from the engine; it can't be given")));
        }
        let list = messages.try_iter().into_iter().flatten();
        let messages = list.enumerate().map(|(i, m)| message(i, &m)).collect::<Result<_>>()?;
        Ok(Conversation { messages, variables, generation_prompt })
    }

    /// Bytes of text in it, roughly: what a template's work may grow with.
    pub(crate) fn bytes(&self) -> usize {
        fn of(value: &Value) -> usize {
            match value.kind() {
                ValueKind::String => value.as_str().map_or(0, str::len),
                ValueKind::Seq => value.try_iter().into_iter().flatten().map(|v| of(&v) + 1).sum(),
                ValueKind::Map => pairs(value).iter().map(|(k, v)| k.len() + of(v)).sum(),
                _ => 1,
            }
        }
        self.messages.iter().flatten().chain(&self.variables).map(|(_, v)| of(v)).sum()
    }

    /// The same with every text but the roles changed by `change`, keys of nested objects included.
    pub(crate) fn map_texts(&self, change: &mut dyn FnMut(&str) -> String) -> Conversation {
        fn of(value: &Value, change: &mut dyn FnMut(&str) -> String) -> Value {
            match value.kind() {
                ValueKind::String => Value::from(change(value.as_str().unwrap_or_default())),
                ValueKind::Seq => value.try_iter().into_iter().flatten().map(|v| of(&v, change)).collect(),
                ValueKind::Map => {
                    Value::from_pairs(pairs(value).into_iter().map(|(k, v)| (change(&k), of(&v, change))))
                }
                _ => value.clone(),
            }
        }
        let mut changed = self.clone();
        for (name, value) in changed.messages.iter_mut().flatten() {
            if name != "role" {
                *value = of(value, change);
            }
        }
        changed.variables.iter_mut().for_each(|(_, value)| *value = of(value, change));
        changed
    }

    /// Refuses what `template` would drop: fields of messages and variables that it never reads. `render` runs it.
    pub(crate) fn check_taken(
        &self,
        template: &ChatTemplate,
        render: &dyn Fn(&Conversation) -> Result<String>,
    ) -> Result<()> {
        let source = template.source();
        let known = if self.variables.is_empty() { Default::default() } else { template.variables() };
        for (name, _) in &self.variables {
            let set_and_read = matches!(name.as_str(), "tools" | "documents") && mentions(source, name);
            if !known.contains(name) && !set_and_read {
                return Err(wrong(format!("{name}: the model's chat template doesn't read a variable of this name")));
            }
        }
        let mut text = None;
        for (i, message) in self.messages.iter().enumerate() {
            for (at, (name, _)) in message.iter().enumerate() {
                if MAY_BE_LEFT_OUT.contains(&name.as_str()) {
                    continue;
                }
                let mut taken = mentions(source, name);
                // Templates name tools and calls as well, so the word alone says nothing of a speaker's name.
                if taken && name == "name" {
                    let with = match &text {
                        Some(text) => text,
                        None => text.insert(render(self)?),
                    };
                    let mut without = self.clone();
                    without.messages[i].remove(at);
                    taken = render(&without).map_or(true, |without| without != *with);
                }
                if !taken {
                    return Err(wrong(format!("messages[{i}].{name}: the model's chat template has no place for it")));
                }
            }
        }
        Ok(())
    }
}

/// True if `source` has `name` as a word.
fn mentions(source: &str, name: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    source
        .match_indices(name)
        .any(|(at, _)| !source[..at].ends_with(part) && !source[at + name.len()..].starts_with(part))
}

fn message(i: usize, message: &Value) -> Result<Vec<(String, Value)>> {
    if message.kind() != ValueKind::Map {
        return Err(wrong(format!("messages[{i}]: must be an object with a role and a content")));
    }
    let mut fields = pairs(message);
    fields.retain(|(name, value)| name == "content" || !value.is_none());
    match fields.iter().find(|(name, _)| name == "role") {
        Some((_, role)) if role.as_str().is_some() => {}
        Some(_) => return Err(wrong(format!("messages[{i}].role: must be a text"))),
        None => return Err(wrong(format!("messages[{i}]: has no role"))),
    }
    for (name, value) in &mut fields {
        match name.as_str() {
            "content" => *value = content(i, value)?,
            "name" if value.as_str().is_none() => return Err(wrong(format!("messages[{i}].name: must be a text"))),
            "tool_calls" => *value = tool_calls(i, value)?,
            _ => {}
        }
    }
    let says = fields.iter().any(|(name, value)| name != "role" && name != "name" && !value.is_none());
    if !says {
        return Err(wrong(format!("messages[{i}]: has neither a content nor tool calls")));
    }
    Ok(fields)
}

/// A content as templates take it: a text, or none.
fn content(i: usize, content: &Value) -> Result<Value> {
    match content.kind() {
        ValueKind::String | ValueKind::None => return Ok(content.clone()),
        ValueKind::Seq => {}
        _ => return Err(wrong(format!("messages[{i}].content: must be a text, a list of text parts, or null"))),
    }
    let mut text = String::new();
    for (j, part) in content.try_iter().into_iter().flatten().enumerate() {
        let field = |name: &str| part.get_attr(name).ok().and_then(|v| v.as_str().map(str::to_owned));
        match (field("type").as_deref(), field("text")) {
            (Some("text"), Some(more)) => text.push_str(&more),
            (kind, _) => {
                let kind = kind.map_or("none".into(), |kind| format!("{kind:?}"));
                let what = "only parts of type \"text\" with a text can be taken";
                return Err(wrong(format!("messages[{i}].content[{j}]: its type is {kind}; {what}")));
            }
        }
    }
    Ok(Value::from(text))
}

/// Tool calls, the arguments of each as an object if they came as the JSON text of one.
fn tool_calls(i: usize, calls: &Value) -> Result<Value> {
    if calls.kind() != ValueKind::Seq {
        return Err(wrong(format!("messages[{i}].tool_calls: must be a list of calls")));
    }
    let parsed = |(name, value): (String, Value)| match value.as_str() {
        Some(text) if name == "arguments" => match serde_json::from_str::<Value>(text) {
            Ok(object) if object.kind() == ValueKind::Map => (name, object),
            _ => (name, value),
        },
        _ => (name, value),
    };
    let list = calls.try_iter().into_iter().flatten().enumerate();
    list.map(|(j, call)| {
        if call.kind() != ValueKind::Map {
            return Err(wrong(format!("messages[{i}].tool_calls[{j}]: must be an object")));
        }
        let fields = pairs(&call).into_iter().map(|(name, value)| match name.as_str() {
            "function" if value.kind() == ValueKind::Map => {
                (name, Value::from_pairs(pairs(&value).into_iter().map(parsed)))
            }
            _ => parsed((name, value)),
        });
        Ok(Value::from_pairs(fields))
    })
    .collect::<Result<Vec<Value>>>()
    .map(Value::from)
}
