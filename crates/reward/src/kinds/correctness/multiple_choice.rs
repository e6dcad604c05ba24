//! `multiple_choice`: compares the letter that the completion chooses with the reference's.

use crate::kinds::answer::after_thoughts;
use crate::kinds::prelude::*;
use crate::math::{boxed, tidy};

define_kind! {
    pub struct MultipleChoice {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// The number of letters to choose from, beginning with A.
        pub choices: u8 = 10 => between(2, 26),
        /// Regex whose first group is the answer; where it does not match, or is empty, the letter is
        /// searched for in the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "multiple_choice",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if the chosen letter (\\boxed{B}, answer is B, \"B.\", (B)) is the one in \
              metadata[reference], else 0; missing without such a letter there",
}

impl Kind for MultipleChoice {
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        chosen(text, finder, self.choices).map(String::from)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let wanted = letter(input.metadata.get(&p.reference)?, p.choices)?;
            Some(indicator(chosen(&input.text, &finder, p.choices) == Some(wanted)))
        })
    }
}

fn chosen(text: &str, finder: &AnswerFinder, choices: u8) -> Option<char> {
    letter(finder.extracted(text).unwrap_or_else(|| after_thoughts(text)), choices)
}

/// The letter (in capitals, among the first `choices` of the alphabet) that a text chooses, by the
/// first of these forms that occurs, at its last occurrence: `\boxed{B}`; `answer is B`,
/// `Answer: (B)`, `choice B`, `option B`; a text that is a letter (`b`, `**B**`) or begins with one
/// as a label (`B. Paris`, `(B) Paris`, `B: Paris`); `(B)`; a letter that ends a clause ("so C"). `None` if
/// the text chooses another letter too, unless a negation precedes that ("not C").
fn letter(text: &str, choices: u8) -> Option<char> {
    if let Some(inside) = boxed(text) {
        let inside = tidy(inside);
        return label(&inside, choices).and_then(|found| alone(found, &inside, choices));
    }
    let announced = announced(text, choices);
    let found = announced
        .or_else(|| label(text, choices))
        .or_else(|| bracketed(text, choices))
        .or_else(|| mentions(text, choices).last().copied())?;
    // A letter before an announced one was given up.
    let from = announced.map_or(0, |(at, _)| at);
    alone(found, &text[from..], choices)
}

/// A letter and its place in a text.
type Found = (usize, char);

/// The letter, unless the text mentions another one.
fn alone((_, letter): Found, text: &str, choices: u8) -> Option<char> {
    mentions(text, choices).iter().all(|(_, other)| *other == letter).then_some(letter)
}

/// The capitals that stand alone as a choice: in brackets, or where a clause or a word of [`INTRODUCED`] leads to
/// them and a clause or a list of letters goes on after them. Without those that are negated.
fn mentions(text: &str, choices: u8) -> Vec<Found> {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '\'' | '’');
    let mut found: Vec<Found> = Vec::new();
    for (at, c) in text.bytes().enumerate().filter(|(_, c)| c.is_ascii_uppercase()) {
        let (before, after) = (&text[..at], &text[at + 1..]);
        if before.ends_with(is_part) || after.starts_with(is_part) {
            continue;
        }
        let is_bracketed = before.ends_with('(') && after.starts_with(')');
        let after = after.trim_start_matches(['*', '_', '"', '`', ']', '$', ')']);
        let goes_on = after.is_empty()
            || after.starts_with(['.', ',', ';', ':', '!', '?', '\n'])
            || starts_with_any(after.trim_start(), &["or ", "and ", "/", "&"]);
        let is_refused =
            starts_with_any(after, &[" is wrong", " is incorrect", " is not", " isn't"]);
        let before = before.trim_end_matches(is_wrapping);
        let word = before.rsplit(|c: char| !is_part(c)).next().unwrap_or_default().to_lowercase();
        let is_introduced = match word.as_str() {
            "" => !before.ends_with(['+', '-', '=']),
            // The letter before it is a choice too.
            "or" | "and" => found.last().is_some_and(|(place, _)| before.len() < place + 8),
            word => {
                INTRODUCED.split(' ').any(|known| known == word)
                    || text[before.len()..at].contains(['\n', ':'])
            }
        };
        if (is_bracketed && !NEGATIONS.contains(&word.as_str()) || goes_on && is_introduced)
            && !is_refused
            && let Some(letter) = among(char::from(c), choices)
        {
            found.push((at, letter));
        }
    }
    found
}

/// Words before a letter that is chosen.
const INTRODUCED: &str = "is be it's that's was so but either maybe perhaps probably likely actually then thus \
                          hence therefore choose chose pick picked select take say answer choice with guess think";
/// Words before a letter that is not chosen.
const NEGATIONS: [&str; 5] = ["not", "nor", "than", "except", "isn't"];

fn starts_with_any(text: &str, beginnings: &[&str]) -> bool {
    beginnings.iter().any(|beginning| text.starts_with(beginning))
}

fn among(c: char, choices: u8) -> Option<char> {
    let upper = c.to_ascii_uppercase();
    let place = u32::from(upper).checked_sub(u32::from('A'))?;
    (place < u32::from(choices)).then_some(upper)
}

/// Whether a character may surround a letter.
fn is_wrapping(c: char) -> bool {
    c.is_whitespace() || matches!(c, '(' | '[' | '*' | '_' | '"' | '\'' | '`' | ':' | '$')
}

/// The letter after the last "answer", "choice" or "option".
fn announced(text: &str, choices: u8) -> Option<Found> {
    let lower = text.to_ascii_lowercase();
    let after = |word: &str| {
        let places = lower.match_indices(word).filter_map(|(at, _)| {
            let rest = &text[at + word.len()..];
            let opened = rest.trim_start_matches(is_wrapping);
            let has_is = opened.get(..2).is_some_and(|is| is.eq_ignore_ascii_case("is"));
            let explicit = has_is || rest[..rest.len() - opened.len()].contains([':', '(']);
            let opened = if has_is { opened[2..].trim_start_matches(is_wrapping) } else { opened };
            Some((text.len() - opened.len(), standalone(opened, explicit, choices)?))
        });
        places.last()
    };
    let found = ["answer", "choice", "option"].into_iter().filter_map(after);
    found.max_by_key(|(at, _)| *at)
}

/// The letter that begins `rest` if no letter, digit or apostrophe follows it.
///
/// After an announcement that is not `explicit`, only a capital without a word after it counts
/// ("an answer A dog would give"). A small letter counts only after an explicit one and before an
/// end ("answer: b.").
fn standalone(rest: &str, explicit: bool, choices: u8) -> Option<char> {
    let mut chars = rest.chars();
    let letter = chars.next().filter(char::is_ascii_alphabetic)?;
    let after = chars.as_str();
    let next = after.chars().next();
    if next.is_some_and(|c| c.is_alphanumeric() || matches!(c, '\'' | '’')) {
        return None;
    }
    let ends = next.is_none_or(|c| matches!(c, ')' | ']' | '.' | ',' | '*' | '\n' | '`' | '"'));
    let word_follows = after.trim_start_matches(' ').starts_with(char::is_alphanumeric);
    // `a, b` are two.
    let is_listed = after.strip_prefix(',').is_some_and(|rest| {
        let mut rest = rest.trim_start().chars();
        rest.next().is_some_and(char::is_alphabetic)
            && !rest.next().is_some_and(char::is_alphanumeric)
    });
    let chosen = match letter.is_ascii_uppercase() {
        true => explicit || !word_follows,
        false => explicit && ends && !is_listed,
    };
    if chosen { among(letter, choices) } else { None }
}

/// The letter that is the whole text or begins it as a label.
fn label(text: &str, choices: u8) -> Option<Found> {
    let opened = text.trim_start_matches(is_wrapping);
    let mut chars = opened.chars();
    let letter = chars.next().filter(char::is_ascii_alphabetic)?;
    let rest = chars.as_str();
    let closed = rest.trim_start_matches(['*', '_', '"', '\'', '`', '$']);
    let is_label = ["", ")", "."].contains(&closed.trim())
        || (letter.is_ascii_uppercase() && closed.starts_with([')', ']', '.', ':', ',']));
    let letter = among(letter, choices).filter(|_| is_label)?;
    Some((text.len() - opened.len(), letter))
}

/// The last `(B)`.
fn bracketed(text: &str, choices: u8) -> Option<Found> {
    let mut places = text.match_indices('(').filter_map(|(at, _)| {
        let mut chars = text[at + 1..].chars();
        let letter = chars.next().filter(char::is_ascii_uppercase)?;
        let letter = among(letter, choices).filter(|_| chars.next() == Some(')'))?;
        Some((at + 1, letter))
    });
    places.next_back()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{score, with_answer};

    #[test]
    fn letters_are_found_where_models_write_them() {
        for (text, found) in [
            ("B", Some('B')),
            ("b", Some('B')),
            ("(c)", Some('C')),
            ("**D**", Some('D')),
            ("B. Paris", Some('B')),
            ("(B) Paris, not (C)", Some('B')),
            ("The answer is B.", Some('B')),
            ("The answer is A because of that", Some('A')),
            ("the correct answer is: (J)", Some('J')),
            ("**Answer:** C\nas it is", Some('C')),
            ("Answer: b.", Some('B')),
            ("First I took choice A, but the answer is E", Some('E')),
            ("option D is right", None),
            ("I pick option D", Some('D')),
            ("\\boxed{F} rather than answer is G", Some('F')),
            ("\\boxed{\\text{(H)}}", Some('H')),
            ("so it must be (I)", Some('I')),
            ("A dog barks", None),
            ("the answer is a dog", None),
            ("It's Bob's answer", None),
            ("K", None),
            ("(Z)", None),
            ("", None),
            ("\\boxed{42}", None),
            ("\\boxed{A, B}", None),
            ("A, B, C, D", None),
            ("A and B", None),
            ("A/B", None),
            ("The answer is A or C", None),
            ("The answer is A, or maybe C.", None),
            ("Answer: A. But maybe B", None),
            ("(A) or (B)", None),
            ("A. Rome\nB. Paris", None),
            ("It is not A, it is B.", Some('B')),
            ("B is wrong, so C", Some('C')),
            ("Not A. The answer is C, not B.", Some('C')),
            ("Vitamin C is good", None),
            ("B. Vitamin C", Some('B')),
            ("(D) Hepatitis B", Some('D')),
            ("Answer: a, b", None),
            ("Answer: a, because it barks", Some('A')),
            ("(B), because (A) is wrong", Some('B')),
            ("I pick A, not B or C", Some('A')),
            ("either A or B", None),
        ] {
            assert_eq!(letter(text, 10), found, "{text}");
        }
        assert_eq!((letter("E", 4), letter("Z", 26)), (None, Some('Z')));
    }

    #[test]
    fn the_letter_is_compared_with_the_reference() {
        let tagged = |text: &str, wanted: Option<&str>| {
            score(&MultipleChoice::default(), &with_answer(text, wanted))
        };
        assert_eq!(tagged("<answer>(B)</answer> not C", Some("B. Paris")), Some(1.0));
        assert_eq!(tagged("<think>A or (C)?</think> B", Some("B. Vitamin C")), Some(1.0));
        assert_eq!(tagged("the answer is C", Some("b")), Some(0.0));
        assert_eq!(tagged("no idea", Some("B")), Some(0.0));
        assert_eq!((tagged("B", Some("Paris")), tagged("B", None)), (None, None));
    }
}
