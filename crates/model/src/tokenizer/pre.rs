//! The rules, by the names that GGUF files use, by which text is split before byte-level BPE.
//!
//! A pattern is part of a vocabulary: the one its model was trained with. Each cuts out its matches and leaves the rest
//! as pieces of their own; later patterns split the pieces of earlier ones.

/// How a named vocabulary splits text.
pub(crate) struct PreTokenizer {
    /// Patterns (Oniguruma), in the order in which they apply.
    pub splits: &'static [&'static str],
    /// True if text is brought to normal form C first.
    pub nfc: bool,
    /// True if a piece that is a token as a whole is taken without merging.
    pub whole_words: bool,
    /// True if a prompt starts with `bos` when the file does not say.
    pub add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const BAILING: &str = concat!(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
);
const SEED_CODER: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const CJK: &str = "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";
const CJK_AND_HANGUL: &str = "[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
/// Letters with case, as the DeepSeek LLM vocabulary lists them.
const CASED: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}",
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}",
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}",
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}",
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}",
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}",
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}",
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}",
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
);
const PUNCTUATION: &str = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";

/// The rules called `name`, `None` if there are none of that name.
pub(crate) fn by_name(name: &str) -> Option<PreTokenizer> {
    let plain = |splits| PreTokenizer { splits, nfc: false, whole_words: false, add_bos: false };
    Some(match name {
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "gpt-2" | "phi-2" | "olmo" | "mpt" | "gigachat" | "exaone4" | "trillion" | "mellum" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            plain(&[r"\p{N}", GPT2])
        }
        "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "lfm2" | "midm-2.0" => {
            PreTokenizer { whole_words: true, add_bos: true, ..plain(&[LLAMA3]) }
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "qwen2" | "megrez" => PreTokenizer { nfc: true, ..plain(&[QWEN2]) },
        "deepseek-r1-qwen" | "hunyuan" | "grok-2" | "solar-open" => plain(&[QWEN2]),
        "qwen35" => PreTokenizer { nfc: true, ..plain(&[QWEN35]) },
        "tekken" => PreTokenizer { whole_words: true, add_bos: true, ..plain(&[TEKKEN]) },
        "gpt-4o" | "llama4" | "minimax-m2" => plain(&[GPT4O]),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
        "seed-coder" => plain(&[SEED_CODER]),
        "deepseek-llm" => plain(&[r"[\r\n]", CASED, PUNCTUATION, r"\s+$", CJK_AND_HANGUL, r"\p{N}"]),
        "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"]),
        "deepseek-v3" | "hunyuan-dense" => plain(&[r"\p{N}{1,3}", CJK, DEEPSEEK3]),
        _ => return None,
    })
}

/// Names that [`by_name`] knows, one of each kind, for messages.
pub(crate) const KNOWN: &str = "default, gpt-2, smollm, falcon, llama-bpe, glm4, qwen2, qwen35, deepseek-r1-qwen, \
                                tekken, gpt-4o, bailingmoe, seed-coder, deepseek-llm, deepseek-coder, deepseek-v3";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_in_messages_is_known() {
        for name in KNOWN.split(", ") {
            assert!(by_name(name).is_some(), "{name}");
        }
        assert!(by_name("gpt2").is_none());
    }

    #[test]
    fn every_pattern_compiles_and_splits_as_its_vocabulary_does() {
        use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
        use tokenizers::{
            OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
        };
        let cut = |name: &str, text: &str| -> Vec<String> {
            let mut pieces = PreTokenizedString::from(text);
            for pattern in by_name(name).unwrap().splits {
                let pattern = SplitPattern::Regex((*pattern).into());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
                split.pre_tokenize(&mut pieces).unwrap();
            }
            let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
            splits.into_iter().map(|(s, _, _)| s.to_string()).collect()
        };
        for name in KNOWN.split(", ") {
            let text = "Hello  wörld, it's 12345 x=1;\n\n 日本語 テキスト HTTPServer\t'LL ...  ";
            assert_eq!(cut(name, text).concat(), text, "{name}");
        }
        assert_eq!(cut("gpt-2", "it's  1234 'S"), ["it", "'s", " ", " 1234", " '", "S"]);
        assert_eq!(cut("smollm", "it's  12"), ["it", "'s", "  ", "1", "2"]);
        assert_eq!(cut("llama-bpe", "it'S 12345\n\n x"), ["it", "'S", " ", "123", "45", "\n\n", " x"]);
        assert_eq!(cut("qwen2", "(abc 12"), ["(abc", " ", "1", "2"]);
        assert_eq!(cut("tekken", "HTTPServer 12/"), ["HTTPServer", " ", "1", "2", "/"]);
        assert_eq!(cut("tekken", "aB"), ["a", "B"]);
        assert_eq!(cut("gpt-4o", "it's 1234"), ["it's", " ", "123", "4"]);
        assert_eq!(cut("falcon", "a12345."), ["a", "123", "45", "."]);
        assert_eq!(cut("deepseek-llm", "Ab 12。x"), ["Ab", " ", "1", "2", "。", "x"]);
        assert_eq!(cut("deepseek-coder", "a\nb 1"), ["a", "\n", "b", " ", "1"]);
        assert_eq!(cut("deepseek-v3", "日本 1234"), ["日本", " ", "123", "4"]);
    }
}
