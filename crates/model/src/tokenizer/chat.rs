//! Conversations to text and to token ids. Only what the template says becomes control tokens; what messages say stays text.

use std::collections::BTreeSet;

use super::pieces::Kind;
use super::{Tokenizer, guarded};
use crate::chat::{ChatMessage, ChatTemplate, Conversation, Marks, TemplateTokens};
use crate::error::{ModelError, Result};

impl Tokenizer {
    /// True if the model comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The text of a conversation of texts; see [`Tokenizer::render_chat`].
    ///
    /// # Errors
    /// As [`Tokenizer::render_chat`].
    pub fn apply_chat_template(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String> {
        self.render_chat(&Conversation::new(messages, add_generation_prompt))
    }

    /// The text of a conversation as the model expects it. Control tokens in messages can't be told from the template's own in
    /// it: [`Tokenizer::encode_chat`] keeps them apart.
    ///
    /// # Errors
    /// `Unsupported` if the model has no template; `Template` if the template fails or refuses the messages; `Conversation` if
    /// it has no place for a field or variable.
    pub fn render_chat(&self, conversation: &Conversation) -> Result<String> {
        let template = self.template()?;
        let tokens = self.template_tokens();
        conversation.check_taken(template, &|c| template.render(c, &tokens))?;
        template.render(conversation, &tokens)
    }

    /// The token ids of a conversation. They start with `bos` exactly once where the model wants it, whether or not the
    /// template writes it. Control tokens in what messages, names, tools and variables say are plain text; those that the
    /// template writes are control tokens. What a template puts together from its own punctuation and a plain word of a role
    /// counts as the template's.
    ///
    /// # Errors
    /// As [`Tokenizer::render_chat`]; `Template` also where a message holds control tokens and the template treats texts in
    /// such a way that they can't be kept apart from its own.
    pub fn encode_chat(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let text = self.render_chat(conversation)?;
        let mut ids = self.encode_apart(conversation, &text)?;
        if let Some(bos) = self.special.bos.filter(|bos| self.special.add_bos && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    fn encode_apart(&self, conversation: &Conversation, text: &str) -> Result<Vec<u32>> {
        let plain = self.parsed(text)?;
        let template = self.template()?;
        let control: Vec<String> = (0..self.vocab_size() as u32)
            .filter(|id| self.is_control(*id))
            .filter_map(|id| self.id_to_token(id))
            .collect();
        let mut used = BTreeSet::new();
        conversation.map_texts(&mut |text| {
            used.extend(Marks::private(text));
            String::new()
        });
        let marks = Marks::new(control.iter().map(String::as_str), template.source(), &used);
        let mut changed = false;
        let marked = conversation.map_texts(&mut |text| {
            let marked = marks.mark(text);
            changed |= marked != text;
            marked
        });
        if !changed {
            return Ok(plain);
        }
        let refused = |why: String| template.fault(None, format!("{why}; leave control tokens out of the messages"));
        let marked = template
            .render(&marked, &self.template_tokens())
            .map_err(|e| refused(format!("it fails where texts of messages are told from its own: {e}")));
        let own = match &marked {
            Ok(marked) => self.control_tokens(marked)?,
            Err(_) => Vec::new(),
        };
        let all = self.control_tokens(text)?;
        if marked.is_ok() && all.iter().map(|(id, _, _)| id).eq(own.iter().map(|(id, _, _)| id)) {
            return Ok(plain);
        }
        let marked = marked?;
        if marks.unmark(&marked) != text {
            let why = "it treats control tokens in messages in a way in which they can't be told from its own";
            return Err(refused(why.into()));
        }
        self.check_joins(&own)?;
        let mut ids = Vec::new();
        let mut at = 0;
        for (id, start, end) in own {
            if at < start {
                ids.extend(self.literal(&marks.unmark(&marked[at..start]))?);
            }
            ids.push(id);
            at = end;
        }
        if at < marked.len() {
            ids.extend(self.literal(&marks.unmark(&marked[at..]))?);
        }
        Ok(ids)
    }

    /// The control tokens in `text`, and where each starts and ends, in bytes.
    fn control_tokens(&self, text: &str) -> Result<Vec<(u32, usize, usize)>> {
        let encoding = guarded(&self.path, "encoding failed", || self.inner.encode(text, false))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens = tokens.map(|(id, (start, end))| (*id, *start, *end));
        // The token for what no other covers may stand for any text.
        let written = |id, start, end| self.id_to_token(id).as_deref() == text.get(start..end).map(str::trim);
        Ok(tokens.filter(|&(id, start, end)| self.is_control(id) && written(id, start, end)).collect())
    }

    /// Refuses vocabularies that treat the start of a text in another way than text after a control token: pieces of a text
    /// can't be encoded by themselves then.
    fn check_joins(&self, own: &[(u32, usize, usize)]) -> Result<()> {
        let Some(token) = own.first().and_then(|(id, _, _)| self.id_to_token(*id)) else { return Ok(()) };
        if self.parsed(&format!("{token}a"))?.get(1..) == Some(self.parsed("a")?.as_slice()) {
            return Ok(());
        }
        Err(ModelError::Unsupported {
            path: self.path.clone(),
            item: None,
            what: "messages hold control tokens, and this tokenizer can't encode them as plain text; leave them out"
                .into(),
        })
    }

    pub(super) fn is_control(&self, id: u32) -> bool {
        self.pieces.kind(id) == Kind::Special
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| ModelError::Unsupported {
            path: self.path.clone(),
            item: Some("chat_template".into()),
            what: "the model has no chat template; give it a plain prompt".into(),
        })
    }

    fn template_tokens(&self) -> TemplateTokens {
        let token = |id: Option<u32>| id.and_then(|id| self.id_to_token(id));
        TemplateTokens {
            bos: token(self.special.bos),
            eos: token(self.special.eos.first().copied()),
            pad: token(self.special.pad),
            unk: token(self.unk),
        }
    }
}
