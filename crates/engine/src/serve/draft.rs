//! Prompt-lookup drafts: what followed the last time that the sequence said what it says now.

/// Longest run of last tokens that is looked for. Longer ones come first: what follows them is likelier to come again.
pub const LONGEST_MATCH: usize = 4;
/// Shortest run. One token alone foretells little, but where weights are streamed a wrong row costs next to nothing:
/// `docs/serving.md` has the figures.
pub const SHORTEST_MATCH: usize = 1;

/// At most `most` tokens that may follow `tokens`: those that followed the latest earlier place at which the longest possible
/// run of its last tokens stands already. Empty if there is no such place.
pub fn look_up(tokens: &[u32], most: usize) -> &[u32] {
    if most == 0 {
        return &[];
    }
    for length in (SHORTEST_MATCH..=LONGEST_MATCH).rev() {
        let Some(start) = tokens.len().checked_sub(length).filter(|start| *start > 0) else { continue };
        let last = &tokens[start..];
        // An earlier place ends before the last token does, so something always follows it.
        if let Some(at) = (0..start).rev().find(|&at| tokens[at..at + length] == *last) {
            let follows = &tokens[at + length..];
            return &follows[..most.min(follows.len())];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_latest_longest_match_is_the_draft() {
        assert_eq!(look_up(&[1, 2, 3, 4, 1, 2], 8), [3, 4, 1, 2]);
        assert_eq!(look_up(&[1, 2, 3, 4, 1, 2], 2), [3, 4]);
        // Of two places the later one counts.
        assert_eq!(look_up(&[1, 2, 7, 1, 2, 8, 1, 2], 1), [8]);
        // A longer match further back beats a shorter one.
        assert_eq!(look_up(&[5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 1), [7]);
        // One token is enough.
        assert_eq!(look_up(&[1, 2, 3, 1], 2), [2, 3]);
        // A run may overlap itself.
        assert_eq!(look_up(&[9, 9, 9], 4), [9]);
    }

    #[test]
    fn without_a_match_there_is_no_draft() {
        for tokens in [&[][..], &[1], &[1, 2], &[1, 2, 3], &[1, 1, 2]] {
            assert!(look_up(tokens, 4).is_empty(), "{tokens:?}");
        }
        assert!(look_up(&[1, 2, 3, 1, 2], 0).is_empty());
    }

    #[test]
    fn a_draft_is_always_a_part_of_the_sequence() {
        let tokens: Vec<u32> = (0..400u32).map(|i| (i * i) % 7).collect();
        for end in 0..tokens.len() {
            let draft = look_up(&tokens[..end], 6);
            assert!(draft.is_empty() || tokens[..end].windows(draft.len()).any(|w| w == draft));
        }
    }
}
