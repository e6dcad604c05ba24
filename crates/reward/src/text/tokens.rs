//! Splitting text into words, and words into small numbers.

use std::collections::HashMap;

use hone_core::text::is_space;

/// The number of a word that is not in the reference: it matches nothing.
pub(super) const ABSENT: u32 = u32::MAX;

/// mteval-v13a's tokens, as sacrebleu's `Tokenizer13a` on text without trailing white space: ASCII
/// symbols are tokens, `.` and `,` too unless within a number, and a dash after a digit. Returns the
/// tokens with white space between them, for [`words`].
///
/// The four substitutions run one after another on bytes, each from left to right without reading a
/// byte twice, like the regular expressions of sacrebleu.
pub(super) fn tokenize_13a(text: &str) -> String {
    let mut line = text.trim_end_matches(is_space).replace("<skipped>", "").replace("-\n", "");
    if line.contains('&') {
        line = line.replace("&quot;", "\"").replace("&amp;", "&");
        line = line.replace("&lt;", "<").replace("&gt;", ">");
    }
    let line = format!(" {} ", line.replace('\n', " "));
    let alone = spread(line.as_bytes(), |_| false, is_symbol, |_| true, [false, true, false]);
    let before = spread(&alone, not_digit, is_point, |_| true, [true, true, false]);
    let after = spread(&before, |_| false, is_point, not_digit, [false, true, true]);
    let dashes =
        spread(&after, |b| b.is_ascii_digit(), |b| b == b'-', |_| true, [true, true, false]);
    // Spaces were inserted between whole characters only, so this is valid UTF-8.
    String::from_utf8(dashes).unwrap_or_default()
}

/// Inserts spaces around each `middle`. `uses` selects which of the bytes before it, itself and
/// after it are part of the pattern: those must fit, and are read once.
fn spread(
    line: &[u8],
    left: impl Fn(u8) -> bool,
    middle: impl Fn(u8) -> bool,
    right: impl Fn(u8) -> bool,
    uses: [bool; 3],
) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len() * 2);
    let mut at = 0;
    let (skip, width) = (usize::from(uses[0]), uses.iter().filter(|used| **used).count());
    while let Some(window) = line.get(at..at + width) {
        let fits = middle(window[skip])
            && (!uses[0] || left(window[0]))
            && (!uses[2] || right(window[width - 1]));
        if !fits {
            out.push(window[0]);
            at += 1;
            continue;
        }
        out.extend_from_slice(&window[..skip]);
        out.extend_from_slice(&[b' ', window[skip], b' ']);
        out.extend_from_slice(&window[skip + 1..]);
        at += width;
    }
    out.extend_from_slice(line.get(at..).unwrap_or_default());
    out
}

fn is_symbol(b: u8) -> bool {
    matches!(b, b'{'..=b'~' | b'['..=b'`' | b' '..=b'&' | b'('..=b'+' | b':'..=b'@' | b'/')
}

fn is_point(b: u8) -> bool {
    matches!(b, b'.' | b',')
}

fn not_digit(b: u8) -> bool {
    !b.is_ascii_digit()
}

/// rouge-score's tokens without its stemmer: lower case, then runs of `a-z` and `0-9`.
pub(super) fn tokenize_rouge(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit()));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The words that white space separates.
pub(super) fn words(line: &str) -> Vec<&str> {
    hone_core::text::words(line).collect()
}

/// The words of a candidate and a reference as numbers; equal words have equal numbers.
pub(super) struct Numbered {
    /// The candidate's words; [`ABSENT`] for a word that is not in the reference.
    pub(super) candidate: Vec<u32>,
    /// The reference's words, numbered from 0 in the order of first use.
    pub(super) reference: Vec<u32>,
    /// The number of different words in the reference.
    pub(super) distinct: usize,
}

/// Numbers the words of both texts.
pub(super) fn number<S: AsRef<str>>(candidate: &[S], reference: &[S]) -> Numbered {
    let mut numbers: HashMap<&str, u32> = HashMap::with_capacity(reference.len());
    let reference: Vec<u32> = reference
        .iter()
        .map(|word| {
            let next = u32::try_from(numbers.len()).unwrap_or(ABSENT);
            *numbers.entry(word.as_ref()).or_insert(next)
        })
        .collect();
    let find = |word: &S| numbers.get(word.as_ref()).copied().unwrap_or(ABSENT);
    Numbered { candidate: candidate.iter().map(find).collect(), reference, distinct: numbers.len() }
}
