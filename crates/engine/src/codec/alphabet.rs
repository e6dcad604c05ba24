//! How the tokens of a tokenizer spell the bytes of texts.

use std::sync::LazyLock;

use serde_json::Value;
use tokenizers::DecoderWrapper;

/// SentencePiece's sign for a space.
const SPACE: char = '\u{2581}';

/// How tokens spell bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// A character for each byte, as in GPT-2.
    Bytes,
    /// SentencePiece's: plain text with [`SPACE`] for spaces, and `<0x0A>` for single bytes.
    Pieces {
        /// Whether texts are encoded with a space before them, which decoding removes.
        prefixed: bool,
    },
}

/// The byte for each character of a byte-level token, by code point.
static BYTE_OF_CHAR: LazyLock<Vec<Option<u8>>> = LazyLock::new(byte_of_char);

impl Alphabet {
    /// The alphabet whose tokens a decoder joins, if it is known.
    pub fn of(decoder: Option<&DecoderWrapper>) -> Option<Self> {
        let decoder = match decoder? {
            DecoderWrapper::ByteLevel(_) => return Some(Self::Bytes),
            DecoderWrapper::Sequence(sequence) => serde_json::to_value(sequence).ok()?,
            _ => return None,
        };
        let steps = decoder.get("decoders")?.as_array()?;
        let kinds: Vec<&str> = steps.iter().filter_map(|step| step["type"].as_str()).collect();
        let prefixed = match kinds[..] {
            ["Replace", "ByteFallback", "Fuse"] => false,
            ["Replace", "ByteFallback", "Fuse", "Strip"] => is_one_space(&steps[3]),
            _ => return None,
        };
        let replace = &steps[0];
        let spaces = replace["pattern"]["String"] == SPACE.to_string() && replace["content"] == " ";
        (spaces && (prefixed || kinds.len() == 3)).then_some(Self::Pieces { prefixed })
    }

    /// The bytes of a token.
    pub fn bytes(self, token: String) -> Vec<u8> {
        match self {
            Self::Bytes => {
                let byte = |c: char| BYTE_OF_CHAR.get(c as usize).copied().flatten();
                // An added token may have characters outside the byte alphabet. It is literal text then.
                let bytes: Option<Vec<u8>> = token.chars().map(byte).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            Self::Pieces { .. } => match single_byte(&token) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE, " ").into_bytes(),
            },
        }
    }

    /// A text that starts with its first token, without the space that encoding put before it.
    pub fn without_prefix(self, text: &str) -> &str {
        match self {
            Self::Pieces { prefixed: true } => text.strip_prefix(' ').unwrap_or(text),
            _ => text,
        }
    }
}

/// Whether a `Strip` removes one space before the text.
fn is_one_space(strip: &Value) -> bool {
    strip["content"] == " " && strip["start"] == 1 && strip["stop"] == 0
}

/// The byte of a token like `<0x0A>`.
fn single_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// GPT-2's byte alphabet: printable Latin-1 characters represent their own byte, the characters
/// from U+0100 on represent the other bytes in order.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut table = vec![None; 512];
    let mut next = 256;
    for byte in 0..=u8::MAX {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[usize::from(byte)] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_spell_spaces_and_bytes() {
        let alphabet = Alphabet::Pieces { prefixed: true };
        let bytes = |token: &str| alphabet.bytes(token.to_owned());
        assert_eq!(bytes("\u{2581}a\u{2581}b"), b" a b");
        assert_eq!((bytes("<0x0A>"), bytes("<0xff>")), (vec![10], vec![255]));
        for literal in ["<0x0>", "<0xGG>", "<s>", "<0x0A> "] {
            assert_eq!(bytes(literal), literal.as_bytes());
        }
        assert_eq!(alphabet.without_prefix("  a"), " a");
        assert_eq!(Alphabet::Pieces { prefixed: false }.without_prefix(" a"), " a");
        assert_eq!(Alphabet::Bytes.without_prefix(" a"), " a");
        assert_eq!(Alphabet::Bytes.bytes("\u{120}a".to_owned()), b" a");
    }
}
