//! `citations`: counts the sources that the completion names.

use std::collections::BTreeSet;

use crate::kinds::prelude::*;

define_kind! {
    pub struct Citations {
        /// Different citations that earn 1.
        pub target: u32 = 3,
        /// Phrases such as "according to"; each that occurs counts as one citation, letter case
        /// ignored.
        pub phrases: Vec<String> = Vec::new(),
    }
    kind: "citations",
    typical_weight: "0.1 to 0.5",
    formula: "min(1, different citations / target): [1], (Smith, 2020), (Smith et al., 2020a; \
              Jones, 1999), addresses that begin with http:// or https://, and those of the phrases \
              that occur",
}

impl Kind for Citations {
    fn check(&self) -> Checked {
        between("target", self.target, 1, 1000)?;
        if self.phrases.is_empty() { Ok(()) } else { texts("phrases", &self.phrases, 64) }
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let target = self.target;
        let phrases: Vec<String> = self.phrases.iter().map(|p| p.to_lowercase()).collect();
        per_sample(move |input| {
            let text = if phrases.is_empty() { String::new() } else { input.text.to_lowercase() };
            let named = phrases.iter().filter(|phrase| text.contains(*phrase)).count();
            Some(share_of_target(citations(&input.text).len() + named, target))
        })
    }
}

/// The different citations in a text.
fn citations(text: &str) -> BTreeSet<&str> {
    let numbered = text.match_indices('[').filter_map(|(at, _)| number(&text[at + 1..]));
    let named = text.match_indices('(').filter_map(|(at, _)| in_brackets(&text[at + 1..]));
    let named = named.flat_map(|inside| inside.split(';').map(str::trim)).filter(|c| is_named(c));
    let ends = |c: char| c.is_whitespace() || matches!(c, '(' | ')' | '[' | ']' | '<' | '>' | '"');
    let links = text.split(ends).filter_map(address);
    numbered.chain(named).chain(links).collect()
}

/// The digits of `12]`.
fn number(rest: &str) -> Option<&str> {
    let digits = rest.bytes().take_while(u8::is_ascii_digit).take(4).count();
    let fits = (1..=3).contains(&digits) && rest[digits..].starts_with(']');
    fits.then(|| &rest[..digits])
}

/// The text before the next bracket, if that is a closing one.
fn in_brackets(rest: &str) -> Option<&str> {
    let end = rest.find(['(', ')'])?;
    rest[end..].starts_with(')').then(|| &rest[..end])
}

/// Whether a text is a capitalized name, then `, ` and a year.
fn is_named(inside: &str) -> bool {
    let Some((name, year)) = inside.rsplit_once(", ") else { return false };
    let digits = year.bytes().take_while(u8::is_ascii_digit).count();
    let letter = &year[digits..];
    let is_year = digits == 4 && (letter.is_empty() || matches!(letter.as_bytes(), [b'a'..=b'z']));
    is_year && name.starts_with(char::is_uppercase)
}

/// The address in a word, without the punctuation that ends its sentence.
fn address(word: &str) -> Option<&str> {
    let found = &word[word.find("http")?..];
    let host = found.strip_prefix("http://").or_else(|| found.strip_prefix("https://"))?;
    let is_host = host.starts_with(char::is_alphanumeric);
    is_host.then(|| found.trim_end_matches(['.', ',', ';', ':']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn a_repeated_citation_counts_once() {
        for (text, found) in [
            ("", 0),
            ("as [1] and [2], again [1]", 2),
            ("[a] [1234] []", 0),
            ("(Smith, 2020) (Smith, 2020) (Jones et al., 1999a; Li, 2001)", 3),
            ("(in May, 2020) (Smith, 20) (see 2020)", 0),
            ("see https://a.example/x, [b](https://a.example/x) and http://b.example.", 2),
            ("http:// https", 0),
        ] {
            let value = score_text(&Citations { target: 10, phrases: Vec::new() }, text);
            assert!(near(value, f64::from(found) / 10.0), "{text}");
        }
    }

    #[test]
    fn each_listed_phrase_counts_once() {
        let phrases = ["According to", "as stated in"].map(str::to_owned).to_vec();
        let p = Citations { target: 4, phrases };
        for (text, value) in [
            ("accordingly", 0.0),
            ("ACCORDING TO him, and according to her", 0.25),
            ("According to [1], as stated in [2]", 1.0),
        ] {
            assert_eq!(score_text(&p, text), value, "{text}");
        }
    }
}
