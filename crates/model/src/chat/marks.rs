//! Stand-ins for the characters of control tokens in what messages say.
//!
//! A template is a program: where its output quotes a message can't be read from the output. So a second conversation is made
//! in which the punctuation of control tokens is replaced, one character for one, by characters for private use. What the
//! template makes of it holds only those control tokens that are its own. One for one, because templates trim, cut and measure
//! texts. Tags that the template itself looks for, such as `</think>`, stay as they are.

use std::collections::BTreeSet;

/// First of the characters for private use that stand in.
const FIRST: u32 = 0x10_0000;
/// Last of them.
const LAST: u32 = 0x10_FFFD;
/// Longest tag of a template, characters.
const MAX_TAG: usize = 64;

/// Which character stands for which.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    /// Character, and what stands for it.
    pairs: Vec<(char, char)>,
    /// Texts in which nothing is replaced.
    tags: Vec<String>,
}

impl Marks {
    /// For the control tokens `control`, and a template with this source. `used` are the characters for private use that the
    /// conversation has already.
    pub fn new<'t>(control: impl IntoIterator<Item = &'t str>, source: &str, used: &BTreeSet<char>) -> Marks {
        let control: Vec<&str> = control.into_iter().collect();
        let mut marked = BTreeSet::new();
        for token in &control {
            marked.extend(token.chars().next());
            marked.extend(token.chars().filter(|c| !c.is_alphanumeric() && !c.is_whitespace() && *c != '_'));
        }
        let free = (FIRST..=LAST).filter_map(char::from_u32).filter(|c| !used.contains(c) && !source.contains(*c));
        Marks { pairs: marked.into_iter().zip(free).collect(), tags: tags(source, &control) }
    }

    /// The characters for private use in `text`.
    pub fn private(text: &str) -> impl Iterator<Item = char> + '_ {
        text.chars().filter(|c| (FIRST..=LAST).contains(&u32::from(*c)))
    }

    /// `text` with stand-ins.
    pub fn mark(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let tag = self.tags.iter().find(|tag| rest.starts_with(tag.as_str()));
            let len = match tag {
                Some(tag) => {
                    out.push_str(tag);
                    tag.len()
                }
                None => {
                    out.push(self.pairs.iter().find(|(own, _)| *own == c).map_or(c, |(_, stand_in)| *stand_in));
                    c.len_utf8()
                }
            };
            rest = &rest[len..];
        }
        out
    }

    /// `text` with the characters that the stand-ins stand for.
    pub fn unmark(&self, text: &str) -> String {
        let own = |c: char| self.pairs.iter().find(|(_, stand_in)| *stand_in == c).map_or(c, |(own, _)| *own);
        text.chars().map(own).collect()
    }
}

/// Texts such as `<think>` in a template that hold no control token, and in no control token lies a part of them.
fn tags(source: &str, control: &[&str]) -> Vec<String> {
    let mut tags: Vec<String> = Vec::new();
    for (at, _) in source.match_indices('<') {
        let rest = &source[at..];
        let Some(end) = rest.char_indices().take(MAX_TAG).find(|(_, c)| *c == '>').map(|(end, _)| end + 1) else {
            continue;
        };
        let tag = &rest[..end];
        let plain = tag[1..end - 1].chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '/'));
        let apart = !control.iter().any(|token| token.contains(tag) || tag.contains(token));
        if plain && apart && !tags.iter().any(|t| t == tag) {
            tags.push(tag.to_owned());
        }
    }
    tags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_off_again_and_leave_tags_alone() {
        let used = BTreeSet::from(['\u{100000}']);
        let marks = Marks::new(["<|im_end|>", "[INST]", "<s>"], "{{ x.split('</think>') }}<s><|im_end|>", &used);
        let text = "a</think>b<|im_end|>[INST] <s> <x> \u{100000}";
        let marked = marks.mark(text);
        assert!(
            marked.contains("</think>")
                && !marked.contains("<|")
                && !marked.contains("[INST")
                && !marked.contains("<s")
        );
        assert_eq!(marked.chars().count(), text.chars().count());
        assert_eq!(marks.unmark(&marked), text);
        assert_eq!(marks.mark("plain text, with stops."), "plain text, with stops.");
    }
}
