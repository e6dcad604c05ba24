//! Similarity of two texts: the metrics of OpenAI's `text_similarity` graders.
//!
//! Each metric is a pure function of a candidate and a reference. It returns a number in 0..1, never
//! NaN, and equals the metric of a Python library (`tests/reference/rewards/text_metrics.py` writes the
//! cases). BLEU, GLEU, METEOR and cosine split text by sacrebleu's 13a rules, ROUGE by
//! rouge-score's, extended to every script; fuzzy matching compares characters. The time is linear in the texts' lengths,
//! except for [`rouge_l`], [`fuzzy_match`] and [`matching_blocks`], which read a bounded beginning of
//! each text.

mod difflib;
mod meteor;
mod tokens;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use rapidfuzz::distance::lcs_seq;
use rapidfuzz::fuzz;

use tokens::{ABSENT, Numbered, number, tokenize_13a, tokenize_rouge, words};

pub use difflib::{DIFFLIB_CHARS, matching_blocks};
pub use meteor::meteor;
pub use tokens::{is_unspaced, words_of_any_script};

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric(fn(&str, &str) -> f64);

impl Metric {
    /// Every metric with OpenAI's name for it (`evaluation_metric`).
    pub const ALL: [(&str, Self); 11] = [
        ("cosine", Self(cosine)),
        ("fuzzy_match", Self(fuzzy_match)),
        ("bleu", Self(bleu)),
        ("gleu", Self(gleu)),
        ("meteor", Self(meteor)),
        ("rouge_1", Self(|candidate, reference| rouge_n(candidate, reference, 1))),
        ("rouge_2", Self(|candidate, reference| rouge_n(candidate, reference, 2))),
        ("rouge_3", Self(|candidate, reference| rouge_n(candidate, reference, 3))),
        ("rouge_4", Self(|candidate, reference| rouge_n(candidate, reference, 4))),
        ("rouge_5", Self(|candidate, reference| rouge_n(candidate, reference, 5))),
        ("rouge_l", Self(rouge_l)),
    ];

    /// The metric of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, metric)| metric)
    }

    /// The similarity of the texts, in 0..1.
    pub fn score(self, candidate: &str, reference: &str) -> f64 {
        (self.0)(candidate, reference)
    }
}

/// Characters of each text that [`fuzzy_match`] compares: more would cost quadratic time.
pub const FUZZY_CHARS: usize = 8_192;

/// `1 - (insertions + deletions) / (|a| + |b|)` in characters, in 0..1; 1 for two empty texts. This
/// is rapidfuzz's `fuzz.ratio / 100` without a processor (case and punctuation count), of the first
/// `chars` characters of each text.
pub fn character_ratio(a: &str, b: &str, chars: usize) -> f64 {
    let first = |text: &str| text.chars().take(chars).collect::<Vec<char>>();
    fuzz::ratio(first(a), first(b)).clamp(0.0, 1.0)
}

/// [`character_ratio`] of the first [`FUZZY_CHARS`] characters of each text.
///
/// OpenAI's guide does not say which of rapidfuzz's ratios `fuzzy_match` uses. Hone uses the plain
/// one, as the others reward a short completion for being a part of the reference.
pub fn fuzzy_match(candidate: &str, reference: &str) -> f64 {
    character_ratio(candidate, reference, FUZZY_CHARS)
}

/// The cosine of the two texts' word counts, `a.b / (|a| |b|)`, over lower-case 13a tokens, in
/// 0..1; 0 where either text is empty. Equals scikit-learn's `CountVectorizer` with that tokenizer
/// and `cosine_similarity`.
///
/// OpenAI's `cosine` compares embeddings (`text-embedding-3-large`) and so recognizes synonyms; this
/// one does not, as it needs no embedding model.
pub fn cosine(candidate: &str, reference: &str) -> f64 {
    let [given, wanted] = [candidate, reference].map(|text| tokenize_13a(&text.to_lowercase()));
    let (given, wanted) = (counts(&given), counts(&wanted));
    let shared = given.iter().filter_map(|(word, count)| Some(count * wanted.get(word)?));
    let square = |counts: &HashMap<&str, f64>| counts.values().map(|n| n * n).sum::<f64>();
    let shared: f64 = shared.sum();
    if shared == 0.0 {
        return 0.0;
    }
    (shared / (square(&given) * square(&wanted)).sqrt()).clamp(0.0, 1.0)
}

fn counts(line: &str) -> HashMap<&str, f64> {
    let mut counts = HashMap::new();
    for word in words(line) {
        *counts.entry(word).or_default() += 1.0;
    }
    counts
}

/// Sentence BLEU as `sacrebleu.sentence_bleu(candidate, [reference]).score / 100`: 13a tokens, case
/// kept, orders 1 to 4 up to the candidate's length (effective order), an order without a match
/// smoothed to `1 / (2^k x its n-grams)` for the k-th such order (`exp`, Chen and Cherry 2014,
/// method 3).
///
/// `min(1, exp(1 - |reference| / |candidate|)) x (geometric mean of the precisions)`, in 0..1;
/// 0 where no word matches or either text is empty. Source: Papineni et al. 2002; sacrebleu 2.6.
pub fn bleu(candidate: &str, reference: &str) -> f64 {
    let orders = all_orders(candidate, reference);
    if orders[0].matched == 0 {
        return 0.0;
    }
    let (mut unmatched, mut logs, mut effective) = (1.0, 0.0, 0.0);
    for order in orders.iter().take_while(|order| order.candidate > 0) {
        effective += 1.0;
        let all = order.candidate as f64;
        if order.matched == 0 {
            unmatched *= 2.0;
            logs += (1.0 / (unmatched * all)).ln();
        } else {
            logs += (order.matched as f64 / all).ln();
        }
    }
    let (given, wanted) = (orders[0].candidate as f64, orders[0].reference as f64);
    let brevity = if given < wanted { (1.0 - wanted / given).exp() } else { 1.0 };
    (brevity * (logs / effective).exp()).clamp(0.0, 1.0)
}

/// Overlaps of 13a tokens, orders 1 to 4.
fn all_orders(candidate: &str, reference: &str) -> [Overlap; 4] {
    let (given, wanted) = (tokenize_13a(candidate), tokenize_13a(reference));
    overlaps(&number(&words(&given), &words(&wanted)))
}

/// Google's GLEU as `nltk.translate.gleu_score.sentence_gleu` over 13a tokens, case kept:
/// `(shared n-grams of orders 1 to 4) / max(the candidate's, the reference's)`, in 0..1; 0 where
/// both texts are empty. Symmetric. Source: Wu et al. 2016; nltk 3.10.
pub fn gleu(candidate: &str, reference: &str) -> f64 {
    let orders = all_orders(candidate, reference);
    let matched: usize = orders.iter().map(|order| order.matched).sum();
    let given: usize = orders.iter().map(|order| order.candidate).sum();
    let wanted: usize = orders.iter().map(|order| order.reference).sum();
    match given.max(wanted) {
        0 => 0.0,
        all => matched as f64 / all as f64,
    }
}

/// Counts of the n-grams of one order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Overlap {
    /// Shared n-grams, each at most as often as in either text.
    matched: usize,
    /// The candidate's n-grams.
    candidate: usize,
    /// The reference's n-grams.
    reference: usize,
}

/// The overlaps of the orders 1 to `ORDERS`.
///
/// An n-gram is numbered by the pair of its first n - 1 words' number and its last word, so each
/// order costs one look-up per word for any n.
fn overlaps<const ORDERS: usize>(words: &Numbered) -> [Overlap; ORDERS] {
    let (mut candidate, mut reference) = (words.candidate.clone(), words.reference.clone());
    let mut distinct = words.distinct;
    let mut found = [Overlap::default(); ORDERS];
    for (longer, overlap) in found.iter_mut().enumerate() {
        if longer > 0 {
            let mut numbers = Numbers::with_capacity_and_hasher(reference.len(), <_>::default());
            let next = |n: &Numbers| u32::try_from(n.len()).unwrap_or(ABSENT);
            extend(&mut reference, words.reference.get(longer..), |pair| {
                let next = next(&numbers);
                *numbers.entry(pair).or_insert(next)
            });
            extend(&mut candidate, words.candidate.get(longer..), |pair| {
                numbers.get(&pair).copied().unwrap_or(ABSENT)
            });
            distinct = numbers.len();
        }
        *overlap = Overlap {
            matched: matches(&candidate, &reference, distinct),
            candidate: candidate.len(),
            reference: reference.len(),
        };
    }
    found
}

/// Extends (n-1)-grams to n-grams by the words that follow them.
fn extend(grams: &mut Vec<u32>, last: Option<&[u32]>, mut number: impl FnMut(u64) -> u32) {
    let last = last.unwrap_or_default();
    grams.truncate(last.len());
    for (gram, word) in grams.iter_mut().zip(last) {
        let known = *gram != ABSENT && *word != ABSENT;
        *gram = if known { number(u64::from(*gram) << 32 | u64::from(*word)) } else { ABSENT };
    }
}

fn matches(candidate: &[u32], reference: &[u32], distinct: usize) -> usize {
    let mut left = vec![0_u32; distinct];
    for gram in reference {
        if let Some(count) = left.get_mut(*gram as usize) {
            *count += 1;
        }
    }
    let mut take = |gram: &&u32| match left.get_mut(**gram as usize) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    };
    candidate.iter().filter(|gram| take(gram)).count()
}

type Numbers = HashMap<u64, u32, BuildHasherDefault<Mix>>;

/// Mixes a pair of small numbers (MurmurHash3's finalizer). It is several times as fast as the
/// default hasher, whose secret is not needed: texts are bounded and only choose the numbers' order.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let mut x = number;
        x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        self.0 = x ^ (x >> 33);
    }
}

/// Words of each text that [`rouge_l`] compares: more would cost quadratic time.
pub const ROUGE_L_WORDS: usize = 8192;

/// ROUGE-`n` as rouge-score's `rougeN` F-measure without stemmer: `2pr / (p + r)` of the precision
/// and recall of the shared n-grams over lower-case runs of `a-z` and `0-9`, in 0..1; 0 where
/// nothing is shared, as for texts without such words (in another script). `n` is clamped to 1..=5.
/// Source: Lin 2004; rouge-score 0.1.2.
pub fn rouge_n(candidate: &str, reference: &str, n: usize) -> f64 {
    let words = number(&tokenize_rouge(candidate), &tokenize_rouge(reference));
    let order = overlaps::<5>(&words)[n.clamp(1, 5) - 1];
    f_measure(order.matched, order.candidate, order.reference)
}

/// ROUGE-L as rouge-score's `rougeL` F-measure without stemmer: `2pr / (p + r)` of the longest
/// common subsequence of words over each text's words, in 0..1; 0 where nothing is shared. Reads
/// the first [`ROUGE_L_WORDS`] words of each text. Source: Lin 2004; rouge-score 0.1.2.
pub fn rouge_l(candidate: &str, reference: &str) -> f64 {
    let (mut given, mut wanted) = (tokenize_rouge(candidate), tokenize_rouge(reference));
    given.truncate(ROUGE_L_WORDS);
    wanted.truncate(ROUGE_L_WORDS);
    let Numbered { candidate, reference, .. } = number(&given, &wanted);
    f_measure(lcs_seq::similarity(candidate, reference), given.len(), wanted.len())
}

fn f_measure(matched: usize, candidate: usize, reference: usize) -> f64 {
    if matched == 0 {
        return 0.0;
    }
    let precision = matched as f64 / candidate as f64;
    let recall = matched as f64 / reference as f64;
    2.0 * precision * recall / (precision + recall)
}

/// A fenced block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FencedBlock<'t> {
    /// The rest of the opening fence's line, which names the language.
    pub info: &'t str,
    /// The lines between the fences.
    pub content: &'t str,
}

/// The fenced blocks of a text.
///
/// A fence is a line of at least three backticks or tildes, indented by at most three spaces, then
/// the language; the block ends at a line of at least as many of the same character, or with the text
/// (CommonMark 0.31, 4.5).
pub fn fenced_blocks(text: &str) -> Vec<FencedBlock<'_>> {
    let (mut blocks, mut position) = (Vec::new(), 0);
    let mut open: Option<(char, usize, usize, &str)> = None;
    let mut keep = |info, begin, end| {
        blocks.push(FencedBlock { info, content: text.get(begin..end).unwrap_or_default() });
    };
    for line in text.split_inclusive('\n') {
        let (start, end) = (position, position + line.len());
        position = end;
        match (open, fence(line)) {
            (None, Some((mark, length, info))) if mark == '~' || !info.contains('`') => {
                open = Some((mark, length, end, info));
            }
            (Some((mark, length, begin, info)), Some((closing, count, "")))
                if closing == mark && count >= length =>
            {
                keep(info, begin, start);
                open = None;
            }
            _ => {}
        }
    }
    if let Some((_, _, begin, info)) = open {
        keep(info, begin, text.len());
    }
    blocks
}

/// Character, length and rest of a line that could be a fence.
fn fence(line: &str) -> Option<(char, usize, &str)> {
    let unindented = line.trim_start_matches(' ');
    let mark = unindented.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let rest = unindented.trim_start_matches(mark);
    let length = unindented.len() - rest.len();
    (line.len() - unindented.len() <= 3 && length >= 3).then(|| (mark, length, rest.trim()))
}

#[cfg(test)]
mod tests;
