//! Just enough of Rust's syntax to find which modules a file names.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Every `.rs` file under a directory, in order; none if it does not exist.
///
/// # Errors
/// If a directory that exists cannot be read.
pub fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !directory.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The code as words: identifiers whole, every other visible character alone; without comments,
/// literals and `#[cfg(test)]` modules.
pub fn words(source: &str) -> Vec<String> {
    without_tests(lex(source))
}

fn lex(source: &str) -> Vec<String> {
    let text: Vec<char> = source.chars().collect();
    let at = |i: usize| text.get(i).copied().unwrap_or('\0');
    let mut words = Vec::new();
    let mut i = 0;
    while i < text.len() {
        let c = at(i);
        if c == '/' && at(i + 1) == '/' {
            while i < text.len() && at(i) != '\n' {
                i += 1;
            }
        } else if c == '/' && at(i + 1) == '*' {
            i = end_of_comment(&text, i);
        } else if c == '"' {
            i = end_of_string(&text, i);
        } else if c == '\'' {
            // A character literal ends within a few characters; else it is a lifetime.
            i = match (at(i + 1), at(i + 2)) {
                ('\\', _) => (i + 3..text.len()).find(|&j| at(j) == '\'').unwrap_or(i) + 1,
                (_, '\'') => i + 3,
                _ => i + 1,
            };
        } else if c.is_alphabetic() || c == '_' {
            let start = i;
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            let word: String = text[start..i].iter().collect();
            if matches!(word.as_str(), "r" | "br" | "cr") && matches!(at(i), '"' | '#') {
                i = end_of_raw_string(&text, i);
            } else {
                words.push(word);
            }
        } else {
            if !c.is_whitespace() {
                words.push(c.to_string());
            }
            i += 1;
        }
    }
    words
}

fn end_of_comment(text: &[char], start: usize) -> usize {
    let (mut depth, mut i) = (0, start);
    while i + 1 < text.len() {
        match (text[i], text[i + 1]) {
            ('/', '*') => (depth, i) = (depth + 1, i + 2),
            ('*', '/') => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    text.len()
}

fn end_of_string(text: &[char], start: usize) -> usize {
    let mut i = start + 1;
    while i < text.len() && text[i] != '"' {
        i += if text[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn end_of_raw_string(text: &[char], start: usize) -> usize {
    let hashes = text[start..].iter().take_while(|&&c| c == '#').count();
    if text.get(start + hashes) != Some(&'"') {
        return start + hashes; // a raw identifier
    }
    let mut i = start + hashes + 1;
    while i < text.len() {
        if text[i] == '"'
            && text[i + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
        {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

fn without_tests(words: Vec<String>) -> Vec<String> {
    let marker = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];
    let mut kept = Vec::new();
    let mut i = 0;
    while i < words.len() {
        if words[i..].len() < marker.len() || words[i..].iter().zip(marker).any(|(a, b)| a != b) {
            kept.push(words[i].clone());
            i += 1;
            continue;
        }
        let mut depth = 0;
        while i < words.len() {
            match words[i].as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            i += 1;
            // `mod tests { … }` or `mod tests;`
            if depth == 0 && matches!(words[i - 1].as_str(), "}" | ";") {
                break;
            }
        }
    }
    kept
}

/// The top-level modules named by a file that lies `depth` modules below the crate's root, through
/// `crate::` or enough of `super::`.
pub fn modules(words: &[String], depth: usize) -> Vec<String> {
    let is = |i: usize, what: &str| words.get(i).is_some_and(|w| w == what);
    let mut found = Vec::new();
    let mut i = 0;
    while i < words.len() {
        let mut next = i;
        if is(i, "crate") && is(i + 1, ":") && is(i + 2, ":") {
            next = i + 3;
        } else if is(i, "super") {
            let mut climbed = 0;
            while is(next, "super") && is(next + 1, ":") && is(next + 2, ":") {
                climbed += 1;
                next += 3;
            }
            if climbed < depth {
                i = next.max(i + 1);
                continue;
            }
        }
        if next > i {
            found.extend(first_segments(words, next));
        }
        i = next.max(i + 1);
    }
    found
}

/// `a` of `a::b`, or `a` and `c` of `{a::b, c::{d, e}}`.
fn first_segments(words: &[String], start: usize) -> Vec<String> {
    let Some(first) = words.get(start) else { return Vec::new() };
    if first != "{" {
        return vec![first.clone()];
    }
    let (mut depth, mut fresh, mut found) = (0, false, Vec::new());
    for word in &words[start..] {
        match word.as_str() {
            "{" => {
                depth += 1;
                fresh = depth == 1;
            }
            "}" => depth -= 1,
            "," => fresh = depth == 1,
            name if fresh => {
                found.push(name.to_owned());
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}
