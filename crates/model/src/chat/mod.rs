//! Conversations: messages as callers give them, the template that makes a text of them, and the marks that keep what
//! messages say apart from what the template says.

mod conversation;
mod marks;
mod template;

pub use conversation::{ChatMessage, Conversation};
pub(crate) use marks::Marks;
pub(crate) use template::{ChatTemplate, MAX_TEMPLATE, TemplateTokens};
