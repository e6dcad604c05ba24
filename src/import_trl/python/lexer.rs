//! Tokens of Python source, as far as keyword arguments and literals need them.

use std::str::Chars;

use serde_json::{Number, Value};

/// A token. A number or text that is not a plain literal, such as `1j` or `f"{x}"`, is `None`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PyToken<'a> {
    Name(&'a str),
    Number(Option<Value>),
    Text(Option<String>),
    Operator(&'a str),
    /// The end of a line outside of brackets.
    Newline,
}

/// A token with its place.
#[derive(Clone, Debug)]
pub(super) struct Lexeme<'a> {
    pub(super) token: PyToken<'a>,
    /// Line of its beginning, from 1.
    pub(super) line: usize,
    /// Bytes from here ...
    pub(super) start: usize,
    /// ... to here.
    pub(super) end: usize,
}

/// Operators of two characters. All others are single characters, which is enough to find arguments.
const PAIRS: [&str; 17] = [
    "==", "!=", "<=", ">=", ":=", "->", "**", "//", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=",
    "@=",
];

/// Prefixes of texts.
const PREFIXES: [&str; 11] = ["r", "u", "b", "f", "t", "rb", "br", "rf", "fr", "rt", "tr"];

/// # Errors
/// The line of a text that is not closed.
pub(super) fn tokens(source: &str) -> Result<Vec<Lexeme<'_>>, String> {
    let mut lexer = PyLexer { source, at: 0, line: 1, depth: 0, found: Vec::new() };
    while let Some(c) = lexer.peek() {
        lexer.step(c)?;
    }
    Ok(lexer.found)
}

struct PyLexer<'a> {
    source: &'a str,
    /// The next byte.
    at: usize,
    line: usize,
    /// Open brackets.
    depth: usize,
    found: Vec<Lexeme<'a>>,
}

impl<'a> PyLexer<'a> {
    fn rest(&self) -> &'a str {
        self.source.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Skips `c` and counts lines.
    fn skip(&mut self, c: char) {
        self.at += c.len_utf8();
        self.line += usize::from(c == '\n');
    }

    fn push(&mut self, token: PyToken<'a>, line: usize, start: usize) {
        self.found.push(Lexeme { token, line, start, end: self.at });
    }

    fn step(&mut self, c: char) -> Result<(), String> {
        let (line, start, rest) = (self.line, self.at, self.rest());
        match c {
            '\n' => {
                self.skip(c);
                if self.depth == 0 {
                    self.push(PyToken::Newline, line, start);
                }
            }
            '#' => self.at += rest.find('\n').unwrap_or(rest.len()),
            // The end of the line is within the statement.
            '\\' if rest.starts_with("\\\n") => {
                self.skip('\\');
                self.skip('\n');
            }
            _ if c.is_whitespace() => self.skip(c),
            '\'' | '"' => self.text("", c, start)?,
            _ if c.is_alphabetic() || c == '_' => {
                let is_part = |c: char| c.is_alphanumeric() || c == '_';
                let name = &rest[..rest.find(|c: char| !is_part(c)).unwrap_or(rest.len())];
                self.at += name.len();
                let prefix = name.to_lowercase();
                match self.peek() {
                    Some(quote @ ('\'' | '"')) if PREFIXES.contains(&prefix.as_str()) => {
                        self.text(&prefix, quote, start)?;
                    }
                    _ => self.push(PyToken::Name(name), line, start),
                }
            }
            _ if c.is_ascii_digit() || is_fraction(rest) => {
                let text = number_at(rest);
                self.at += text.len();
                self.push(PyToken::Number(number(text)), line, start);
            }
            _ => {
                match c {
                    '(' | '[' | '{' => self.depth += 1,
                    ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
                let pair = PAIRS.iter().any(|pair| rest.starts_with(pair));
                self.at += if pair { 2 } else { c.len_utf8() };
                self.push(PyToken::Operator(&self.source[start..self.at]), line, start);
            }
        }
        Ok(())
    }

    /// A text that begins with `quote` at the current place, after its prefix.
    fn text(&mut self, prefix: &str, quote: char, start: usize) -> Result<(), String> {
        let line = self.line;
        let triple = String::from_iter([quote; 3]);
        let end = if self.rest().starts_with(&triple) { triple } else { quote.to_string() };
        self.at += end.len();
        let first = self.at;
        while !self.rest().starts_with(&end) {
            let unclosed = || format!("line {line}: a text is not closed");
            let c = self.peek().ok_or_else(unclosed)?;
            if c == '\n' && end.len() == 1 {
                return Err(unclosed());
            }
            self.skip(c);
            // The character after a backslash is never the end, in raw texts too.
            if let Some(next) = self.peek().filter(|_| c == '\\') {
                self.skip(next);
            }
        }
        let content = &self.source[first..self.at];
        self.at += end.len();
        let is_computed = prefix.contains(['f', 't']) && content.contains(['{', '}']);
        let value = if is_computed || prefix.contains('b') {
            None
        } else if prefix.contains('r') {
            Some(content.to_owned())
        } else {
            unescaped(content)
        };
        self.push(PyToken::Text(value), line, start);
        Ok(())
    }
}

/// Whether `rest` begins with a number such as `.5`.
fn is_fraction(rest: &str) -> bool {
    rest.strip_prefix('.').is_some_and(|after| after.starts_with(|c: char| c.is_ascii_digit()))
}

/// The number at the beginning of `rest`, with a suffix such as `j`.
fn number_at(rest: &str) -> &str {
    let is_hex = rest.starts_with("0x") || rest.starts_with("0X");
    let mut previous = ' ';
    let ends = |&(_, c): &(usize, char)| {
        let is_sign = matches!(c, '+' | '-') && matches!(previous, 'e' | 'E') && !is_hex;
        previous = c;
        !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.') || is_sign)
    };
    let end = rest.char_indices().find(ends).map_or(rest.len(), |(at, _)| at);
    &rest[..end]
}

fn number(text: &str) -> Option<Value> {
    let plain = text.replace('_', "").to_ascii_lowercase();
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = plain.strip_prefix(prefix) {
            return u64::from_str_radix(digits, radix).ok().map(Value::from);
        }
    }
    if let Ok(whole) = plain.parse::<u64>() {
        return Some(whole.into());
    }
    Number::from_f64(plain.parse().ok()?).map(Value::Number)
}

/// The characters that a text without prefix stands for; `None` for escapes by octal code or name.
fn unescaped(text: &str) -> Option<String> {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            plain.push(c);
            continue;
        }
        match chars.next()? {
            '\n' => {}
            'n' => plain.push('\n'),
            't' => plain.push('\t'),
            'r' => plain.push('\r'),
            'a' => plain.push('\u{7}'),
            'b' => plain.push('\u{8}'),
            'f' => plain.push('\u{c}'),
            'v' => plain.push('\u{b}'),
            'x' => plain.push(by_code(&mut chars, 2)?),
            'u' => plain.push(by_code(&mut chars, 4)?),
            'U' => plain.push(by_code(&mut chars, 8)?),
            '0'..='7' | 'N' => return None,
            other @ ('\\' | '\'' | '"') => plain.push(other),
            // Python keeps the backslash of an unknown escape.
            other => plain.extend(['\\', other]),
        }
    }
    Some(plain)
}

fn by_code(chars: &mut Chars<'_>, digits: usize) -> Option<char> {
    let code: String = chars.take(digits).collect();
    char::from_u32(u32::from_str_radix(&code, 16).ok()?)
}
