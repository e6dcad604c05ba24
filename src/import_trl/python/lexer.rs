//! Tokens of Python source, as far as keyword arguments and literals need them.

use std::str::Chars;

use regex::Regex;
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

/// One token at a time. The character after a backslash is never the end of a text, in raw texts too. Operators are
/// those of two characters, and any other character, which is enough to find arguments.
const TOKEN: &str = r#"(?xs)
    (?P<skipped> [^\S\n]+ | \#[^\n]* | \\\n )
    | (?P<newline> \n )
    | (?i:(?P<prefix> r|u|b|f|t|rb|br|rf|fr|rt|tr )?)
      (?: """ (?P<text1> (?: \\. | [^\\] )*? ) """
        | ''' (?P<text2> (?: \\. | [^\\] )*? ) '''
        | "   (?P<text3> (?: \\. | [^\\"\n] )* ) "
        | '   (?P<text4> (?: \\. | [^\\'\n] )* ) ' )
    | (?P<name> [\p{Alphabetic}_] [\p{Alphabetic}\p{N}_]* )
    | (?P<number> 0[xX] [0-9a-zA-Z_.]* | (?: [0-9] | \.[0-9] ) (?: [eE][+-] | [0-9a-zA-Z_.] )* )
    | (?P<operator> [=!<>:*/+\-%&|^@]= | -> | \*\* | // | . )"#;

/// # Errors
/// The line of a text that is not closed.
pub(super) fn tokens(source: &str) -> Result<Vec<Lexeme<'_>>, String> {
    let pattern = Regex::new(TOKEN).map_err(|error| error.to_string())?;
    let (mut found, mut line, mut depth) = (Vec::new(), 1, 0_usize);
    for captures in pattern.captures_iter(source) {
        let named = |name: &str| captures.name(name).map(|part| part.as_str());
        let all = captures.get_match();
        let (start, end) = (all.start(), all.end());
        let texts = ["text1", "text2", "text3", "text4"];
        let unclosed = || format!("line {line}: a text is not closed");
        let token = if let Some(content) = texts.into_iter().find_map(named) {
            // The first two quotes of three.
            let quote = all.as_str().chars().next_back();
            if content.is_empty() && quote.is_some_and(|q| source[end..].starts_with(q)) {
                return Err(unclosed());
            }
            Some(PyToken::Text(text(named("prefix").unwrap_or_default(), content)))
        } else if let Some(operator) = named("operator") {
            match operator {
                "'" | "\"" => return Err(unclosed()),
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            Some(PyToken::Operator(operator))
        } else if named("newline").is_some() {
            (depth == 0).then_some(PyToken::Newline)
        } else {
            let name = named("name").map(PyToken::Name);
            name.or_else(|| named("number").map(|digits| PyToken::Number(number(digits))))
        };
        found.extend(token.map(|token| Lexeme { token, line, start, end }));
        line += all.as_str().matches('\n').count();
    }
    Ok(found)
}

/// The value of a text with a prefix such as `r`; `None` if it would have to be computed.
fn text(prefix: &str, content: &str) -> Option<String> {
    let prefix = prefix.to_ascii_lowercase();
    let is_computed = prefix.contains(['f', 't']) && content.contains(['{', '}']);
    if is_computed || prefix.contains('b') {
        None
    } else if prefix.contains('r') {
        Some(content.to_owned())
    } else {
        unescaped(content)
    }
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
    const ESCAPES: [(char, &str); 11] = [
        ('\n', ""),
        ('n', "\n"),
        ('t', "\t"),
        ('r', "\r"),
        ('a', "\u{7}"),
        ('b', "\u{8}"),
        ('f', "\u{c}"),
        ('v', "\u{b}"),
        ('\\', "\\"),
        ('\'', "'"),
        ('"', "\""),
    ];
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            plain.push(c);
            continue;
        }
        match chars.next()? {
            'x' => plain.push(by_code(&mut chars, 2)?),
            'u' => plain.push(by_code(&mut chars, 4)?),
            'U' => plain.push(by_code(&mut chars, 8)?),
            '0'..='7' | 'N' => return None,
            other => match ESCAPES.iter().find(|(escape, _)| *escape == other) {
                Some((_, meaning)) => plain.push_str(meaning),
                // Python keeps the backslash of an unknown escape.
                None => plain.extend(['\\', other]),
            },
        }
    }
    Some(plain)
}

fn by_code(chars: &mut Chars<'_>, digits: usize) -> Option<char> {
    let code: String = chars.take(digits).collect();
    char::from_u32(u32::from_str_radix(&code, 16).ok()?)
}
