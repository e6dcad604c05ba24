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

/// rouge-score's tokens without its stemmer, for every script: lower case, then runs of letters, marks and digits,
/// of which each character of a script without spaces is a token of its own. rouge-score itself drops all but `a-z`
/// and `0-9`, so that texts of other scripts have no token and no similarity with themselves.
pub(super) fn tokenize_rouge(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let is_word = |c: char| c.is_alphanumeric() || is_mark(c);
    let runs = lower.split(|c: char| !is_word(c)).filter(|run| !run.is_empty());
    runs.flat_map(single_characters).map(str::to_owned).collect()
}

/// Whether a character belongs to a script that writes words without spaces between them: Chinese, Japanese, Thai,
/// Lao, Khmer, Burmese and Tibetan.
pub fn is_unspaced(c: char) -> bool {
    matches!(u32::from(c),
        0x0e00..=0x0fff | 0x1000..=0x109f | 0x1780..=0x17ff | 0x2e80..=0x2fdf | 0x3005..=0x30ff
        | 0x31f0..=0x31ff | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0xff66..=0xff9f
        | 0x20000..=0x3ffff)
}

/// Combining marks, which belong to the letter before them.
fn is_mark(c: char) -> bool {
    matches!(u32::from(c),
        0x0300..=0x036f | 0x0483..=0x0489 | 0x0591..=0x05c7 | 0x0610..=0x061a | 0x064b..=0x065f | 0x06d6..=0x06ed
        | 0x0900..=0x0903 | 0x093a..=0x094f | 0x0981..=0x0983 | 0x09bc..=0x09cd | 0x0a01..=0x0a03
        | 0x0a3c..=0x0a4d | 0x0abc..=0x0acd | 0x0b3c..=0x0b4d | 0x0bbe..=0x0bcd | 0x0c3e..=0x0c4d
        | 0x0cbc..=0x0ccd | 0x0d3e..=0x0d4d | 0x0e31..=0x0e4e | 0x102b..=0x103e | 0x17b4..=0x17d3)
}

/// The words that white space separates, of which each character of a script without spaces is a word of its own,
/// with the marks after it.
pub fn words_of_any_script(text: &str) -> Vec<&str> {
    hone_core::text::words(text).flat_map(single_characters).collect()
}

/// A word, or its parts if it has characters of a script without spaces.
fn single_characters(word: &str) -> Vec<&str> {
    if word.is_ascii() {
        return vec![word];
    }
    let (mut parts, mut from, mut previous) = (Vec::new(), 0, None);
    for (at, c) in word.char_indices() {
        let splits = previous.is_some_and(|previous| is_unspaced(c) || is_unspaced(previous));
        if splits && !is_mark(c) {
            parts.push(&word[from..at]);
            from = at;
        }
        previous = Some(c);
    }
    parts.push(&word[from..]);
    parts
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
