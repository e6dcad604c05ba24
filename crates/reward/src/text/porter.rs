//! Porter's stemmer with nltk's extensions (`PorterStemmer()` of nltk 3.10, its default mode).
//!
//! M. F. Porter, "An algorithm for suffix stripping", Program 14.3 (1980). Snowball's stemmers (the
//! crate rust-stemmers) differ: they lack the irregular forms and the rules that nltk adds.

/// Words with an irregular stem.
#[rustfmt::skip]
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"), ("skies", "sky"), ("dying", "die"), ("lying", "lie"), ("tying", "tie"),
    ("news", "news"), ("innings", "inning"), ("inning", "inning"), ("outings", "outing"),
    ("outing", "outing"), ("cannings", "canning"), ("canning", "canning"), ("howe", "howe"),
    ("proceed", "proceed"), ("exceed", "exceed"), ("succeed", "succeed"),
];

/// Step 2: suffixes and their replacements after a stem with measure above 0.
#[rustfmt::skip]
const STEP_2: [(&str, &str); 22] = [
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
    ("fulli", "ful"), ("logi", "log"),
];

/// Step 3: as step 2.
#[rustfmt::skip]
const STEP_3: [(&str, &str); 7] = [
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""),
    ("ness", ""),
];

/// Step 4: suffixes dropped after a stem with measure above 1.
const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
];

/// The stem of a lower-case word.
pub(super) fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(form, _)| *form == word) {
        return (*stem).to_owned();
    }
    let mut word: Vec<char> = word.chars().collect();
    if word.len() > 2 {
        plurals(&mut word);
        past_and_gerund(&mut word);
        final_y(&mut word);
        suffixes(&mut word);
        final_e_and_l(&mut word);
    }
    word.into_iter().collect()
}

/// Step 1a.
fn plurals(word: &mut Vec<char>) {
    if ends(word, "ies") {
        let cut = if word.len() == 4 { 1 } else { 2 };
        word.truncate(word.len() - cut);
    } else if ends(word, "sses") {
        word.truncate(word.len() - 2);
    } else if ends(word, "s") && !ends(word, "ss") {
        word.pop();
    }
}

/// Step 1b.
fn past_and_gerund(word: &mut Vec<char>) {
    if ends(word, "ied") {
        let cut = if word.len() == 4 { 1 } else { 2 };
        word.truncate(word.len() - cut);
        return;
    }
    if ends(word, "eed") {
        if measure(&word[..word.len() - 3]) > 0 {
            word.pop();
        }
        return;
    }
    let suffix = ["ed", "ing"].into_iter().find(|suffix| {
        ends(word, suffix) && vowels_and_consonants(&word[..word.len() - suffix.len()]).any(|c| !c)
    });
    let Some(suffix) = suffix else { return };
    word.truncate(word.len() - suffix.len());
    if ["at", "bl", "iz"].into_iter().any(|suffix| ends(word, suffix)) {
        word.push('e');
    } else if ends_double_consonant(word) {
        if !matches!(word.last(), Some('l' | 's' | 'z')) {
            word.pop();
        }
    } else if measure(word) == 1 && ends_short(word) {
        word.push('e');
    }
}

/// Step 1c: `y` after a consonant that is not the whole stem.
fn final_y(word: &mut [char]) {
    if let [stem @ .., last @ 'y'] = word
        && stem.len() > 1
        && vowels_and_consonants(stem).last() == Some(true)
    {
        *last = 'i';
    }
}

/// Steps 2, 3 and 4: the first suffix of each list that the word ends with, if its stem is long
/// enough.
fn suffixes(word: &mut Vec<char>) {
    if ends(word, "alli") && measure(&word[..word.len() - 4]) > 0 {
        word.truncate(word.len() - 2);
    }
    replace(word, &STEP_2);
    replace(word, &STEP_3);
    if let Some(suffix) = STEP_4.into_iter().find(|suffix| ends(word, suffix)) {
        let stem = &word[..word.len() - suffix.len()];
        let fits = suffix != "ion" || matches!(stem.last(), Some('s' | 't'));
        if measure(stem) > 1 && fits {
            word.truncate(stem.len());
        }
    }
}

fn replace(word: &mut Vec<char>, rules: &[(&str, &str)]) {
    let Some((suffix, with)) = rules.iter().find(|(suffix, _)| ends(word, suffix)) else { return };
    let stem = word.len() - suffix.len();
    // The l of `logi` counts as part of the stem, so that short stems like `geo` are treated alike.
    let measured = if *suffix == "logi" { stem + 1 } else { stem };
    if measure(&word[..measured]) > 0 {
        word.truncate(stem);
        word.extend(with.chars());
    }
}

/// Steps 5a and 5b.
fn final_e_and_l(word: &mut Vec<char>) {
    if let [stem @ .., 'e'] = word.as_slice() {
        let m = measure(stem);
        if m > 1 || (m == 1 && !ends_short(stem)) {
            word.pop();
        }
    }
    if ends(word, "ll") && measure(&word[..word.len() - 1]) > 1 {
        word.pop();
    }
}

fn ends(word: &[char], suffix: &str) -> bool {
    word.len() >= suffix.len()
        && suffix.bytes().rev().zip(word.iter().rev()).all(|(b, c)| char::from(b) == *c)
}

/// Whether each letter is a consonant; `y` is one unless it follows a consonant.
fn vowels_and_consonants(word: &[char]) -> impl Iterator<Item = bool> {
    word.iter().scan(false, |before, c| {
        *before = match c {
            'a' | 'e' | 'i' | 'o' | 'u' => false,
            'y' => !*before,
            _ => true,
        };
        Some(*before)
    })
}

/// Porter's m: the number of consonants that follow a vowel.
fn measure(stem: &[char]) -> usize {
    let mut vowel = false;
    let turns = vowels_and_consonants(stem)
        .filter(|consonant| std::mem::replace(&mut vowel, !consonant) && *consonant);
    turns.count()
}

fn ends_double_consonant(word: &[char]) -> bool {
    matches!(word, [.., a, b] if a == b) && vowels_and_consonants(word).last() == Some(true)
}

/// Porter's *o: the word ends with consonant, vowel, and a consonant other than w, x, y; in nltk
/// also a word of a vowel and a consonant.
fn ends_short(word: &[char]) -> bool {
    let (mut ending, mut length) = ([false; 3], 0);
    for consonant in vowels_and_consonants(word) {
        ending = [ending[1], ending[2], consonant];
        length += 1;
    }
    match length {
        0 | 1 => false,
        2 => ending == [false, false, true],
        _ => ending == [true, false, true] && !matches!(word.last(), Some('w' | 'x' | 'y')),
    }
}
