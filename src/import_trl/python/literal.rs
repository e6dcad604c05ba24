//! Literals of Python, read from tokens and never evaluated.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::lexer::{Lexeme, PyToken};

/// Names with their literals.
pub(super) type Constants<'a> = BTreeMap<&'a str, Value>;

/// Lists within lists beyond this are not read, so that hostile files do not exhaust the stack.
const DEEPEST: usize = 32;

/// The value of an expression that is a literal, a list, tuple or dictionary of literals, or the name
/// of a constant; `None` for every other expression.
pub(super) fn literal(tokens: &[Lexeme<'_>], constants: &Constants<'_>) -> Option<Value> {
    nested(tokens, constants, DEEPEST)
}

fn nested(tokens: &[Lexeme<'_>], constants: &Constants<'_>, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    let (first, rest) = tokens.split_first()?;
    let value = |tokens: &[Lexeme<'_>]| nested(tokens, constants, depth);
    match (&first.token, rest) {
        (PyToken::Name("True"), []) => Some(true.into()),
        (PyToken::Name("False"), []) => Some(false.into()),
        (PyToken::Name("None"), []) => Some(Value::Null),
        (PyToken::Name(name), []) => constants.get(*name).cloned(),
        (PyToken::Number(number), []) => number.clone(),
        // Adjacent texts are one.
        (PyToken::Text(_), _) => {
            tokens.iter().map(text).collect::<Option<String>>().map(Value::from)
        }
        (PyToken::Operator("-"), [Lexeme { token: PyToken::Number(Some(number)), .. }]) => {
            negative(number)
        }
        (PyToken::Operator("+"), [number]) => match &number.token {
            PyToken::Number(number) => number.clone(),
            _ => None,
        },
        (PyToken::Operator(open), [inner @ .., last]) => match (*open, &last.token) {
            ("[", PyToken::Operator("]")) => items(inner).into_iter().map(value).collect(),
            ("(", PyToken::Operator(")")) => match items(inner).as_slice() {
                // Parentheses without a comma do not make a tuple.
                &[item] if item.len() == inner.len() => value(item),
                several => several.iter().copied().map(value).collect(),
            },
            ("{", PyToken::Operator("}")) => {
                let entry = |item: &[Lexeme<'_>]| {
                    let colon = item.iter().position(|t| t.token == PyToken::Operator(":"))?;
                    let key = value(item.get(..colon)?)?;
                    Some((key.as_str()?.to_owned(), value(item.get(colon + 1..)?)?))
                };
                let entries =
                    items(inner).into_iter().map(entry).collect::<Option<Map<String, Value>>>();
                entries.map(Value::Object)
            }
            _ => None,
        },
        _ => None,
    }
}

fn text<'a>(lexeme: &'a Lexeme<'_>) -> Option<&'a str> {
    match &lexeme.token {
        PyToken::Text(text) => text.as_deref(),
        _ => None,
    }
}

fn negative(number: &Value) -> Option<Value> {
    match number.as_i64() {
        Some(whole) => whole.checked_neg().map(Value::from),
        None => number.as_f64().map(|x| Value::from(-x)),
    }
}

/// The parts of a list between its commas, without an empty part after the last comma.
pub(super) fn items<'t, 'a>(tokens: &'t [Lexeme<'a>]) -> Vec<&'t [Lexeme<'a>]> {
    let mut depth = 0_i64;
    let mut found: Vec<_> = tokens
        .split(|lexeme| {
            match lexeme.token {
                PyToken::Operator("(" | "[" | "{") => depth += 1,
                PyToken::Operator(")" | "]" | "}") => depth -= 1,
                _ => {}
            }
            depth == 0 && lexeme.token == PyToken::Operator(",")
        })
        .collect();
    if found.last().is_some_and(|last| last.is_empty()) {
        found.pop();
    }
    found
}

/// The names that are set to one literal in the whole file: `NAME = 256` or `NAME: int = 256`.
pub(super) fn constants<'a>(tokens: &[Lexeme<'a>]) -> Constants<'a> {
    let mut found = Constants::new();
    let mut ambiguous = BTreeSet::new();
    for statement in tokens.split(|t| matches!(t.token, PyToken::Newline | PyToken::Operator(";")))
    {
        let Some((PyToken::Name(name), rest)) = statement.split_first().map(|(n, r)| (&n.token, r))
        else {
            continue;
        };
        let name = *name;
        let rest = match rest {
            [Lexeme { token: PyToken::Operator(":"), .. }, _, rest @ ..] => rest,
            rest => rest,
        };
        let value = match rest.split_first().map(|(operator, value)| (&operator.token, value)) {
            Some((PyToken::Operator("="), value)) => literal(value, &found),
            // Such as `steps += 1`.
            Some((PyToken::Operator(operator), _)) if operator.ends_with('=') => None,
            _ => continue,
        };
        let is_same = found.get(name).is_none_or(|known| value.as_ref() == Some(known));
        match value.filter(|_| is_same && !ambiguous.contains(name)) {
            Some(value) => drop(found.insert(name, value)),
            None => {
                found.remove(name);
                ambiguous.insert(name);
            }
        }
    }
    found
}
