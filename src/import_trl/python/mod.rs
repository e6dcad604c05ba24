//! The options in a Python file: keyword arguments of the calls that make up a training script. The
//! file is parsed and never run.

mod lexer;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::options::{Given, TrlOptions};
use lexer::{Lexeme, PyToken, tokens};

/// A call: its name, the object before the dot, and its arguments.
struct PyCall<'t, 'a> {
    name: &'a str,
    object: &'a str,
    line: usize,
    /// Their names, where they have one, and expressions.
    arguments: Vec<(Option<&'a str>, &'t [Lexeme<'a>])>,
}

/// The arguments of `GRPOConfig`, `LoraConfig`, `get_peft_model` and of a model's `from_pretrained`, the
/// model and the reward functions of `GRPOTrainer`, and the dataset of `load_dataset`.
///
/// # Errors
/// If there is not exactly one call of `GRPOConfig`, if it or `LoraConfig` has an argument without a
/// name, or if a text or a bracket is not closed.
pub(super) fn options(source: &str) -> Result<TrlOptions, String> {
    let tokens = tokens(source)?;
    let calls = calls(&tokens)?;
    let reader = Reader { source, constants: constants(&tokens) };
    let mut options = TrlOptions::default();
    if only("GRPOConfig", &calls)? == 0 {
        return Err("it has no call of GRPOConfig".to_owned());
    }
    only("LoraConfig", &calls)?;
    for call in &calls {
        match call.name {
            "GRPOConfig" | "LoraConfig" => {
                options.has_lora_config |= call.name == "LoraConfig";
                reader.keywords(call, true, &mut options)?;
            }
            "get_peft_model" => reader.keywords(call, false, &mut options)?,
            "from_pretrained" if call.object.contains("Model") => {
                if let Some((None, model)) = call.arguments.first() {
                    reader.insert("model_name_or_path", model, &mut options);
                }
                reader.keywords(call, false, &mut options)?;
            }
            "GRPOTrainer" => reader.trainer(call, &mut options),
            "load_dataset" => reader.dataset(call, &mut options),
            _ => {}
        }
    }
    Ok(options)
}

/// The calls of names, in the order of the file.
fn calls<'t, 'a>(tokens: &'t [Lexeme<'a>]) -> Result<Vec<PyCall<'t, 'a>>, String> {
    const NAMES: [&str; 6] = [
        "GRPOConfig",
        "LoraConfig",
        "get_peft_model",
        "from_pretrained",
        "GRPOTrainer",
        "load_dataset",
    ];
    let name_at = |at: Option<usize>| match at.and_then(|at| tokens.get(at)).map(|t| &t.token) {
        Some(PyToken::Name(name)) => *name,
        _ => "",
    };
    let mut found = Vec::new();
    for (at, pair) in tokens.windows(2).enumerate() {
        let [Lexeme { token: PyToken::Name(name), line, .. }, open] = pair else { continue };
        let defined = ["class", "def"].contains(&name_at(at.checked_sub(1)));
        if open.token != PyToken::Operator("(") || !NAMES.contains(name) || defined {
            continue;
        }
        let inner = tokens.get(at + 2..).unwrap_or_default();
        let close = closing(inner)
            .ok_or_else(|| format!("line {line}: the bracket of {name} is not closed"))?;
        let object = name_at(at.checked_sub(2));
        let arguments = items(&inner[..close]).into_iter().map(split).collect();
        found.push(PyCall { name, object, line: *line, arguments });
    }
    Ok(found)
}

/// The place of the bracket that closes one that is open before `tokens`.
fn closing(tokens: &[Lexeme<'_>]) -> Option<usize> {
    let mut depth = 1_usize;
    tokens.iter().position(|lexeme| {
        match lexeme.token {
            PyToken::Operator("(" | "[" | "{") => depth += 1,
            PyToken::Operator(")" | "]" | "}") => depth -= 1,
            _ => {}
        }
        depth == 0
    })
}

/// The number of calls of `name`, which is refused above 1.
fn only(name: &str, calls: &[PyCall<'_, '_>]) -> Result<usize, String> {
    let found = calls.iter().filter(|call| call.name == name);
    let lines: Vec<String> = found.map(|call| call.line.to_string()).collect();
    if lines.len() > 1 {
        let lines = lines.join(", ");
        return Err(format!("{name} is called in lines {lines}: leave only the call to convert"));
    }
    Ok(lines.len())
}

/// The name of an argument, if it has one, and its expression.
fn split<'t, 'a>(argument: &'t [Lexeme<'a>]) -> (Option<&'a str>, &'t [Lexeme<'a>]) {
    match argument {
        [Lexeme { token: PyToken::Name(name), .. }, equals, value @ ..]
            if equals.token == PyToken::Operator("=") =>
        {
            (Some(name), value)
        }
        _ => (None, argument),
    }
}

struct Reader<'a> {
    source: &'a str,
    constants: Constants<'a>,
}

impl Reader<'_> {
    /// The text of an expression.
    fn text(&self, expression: &[Lexeme<'_>]) -> String {
        let (Some(first), Some(last)) = (expression.first(), expression.last()) else {
            return String::new();
        };
        self.source.get(first.start..last.end).unwrap_or_default().to_owned()
    }

    fn insert(&self, name: &str, expression: &[Lexeme<'_>], options: &mut TrlOptions) {
        let given = match literal(expression, &self.constants) {
            Some(value) => Given::Literal(value),
            None => Given::Expression(self.text(expression)),
        };
        options.insert(name, given, expression.first().map(|lexeme| lexeme.line));
    }

    /// The named arguments of a call. `strict` refuses arguments without a name.
    fn keywords(
        &self,
        call: &PyCall<'_, '_>,
        strict: bool,
        options: &mut TrlOptions,
    ) -> Result<(), String> {
        for (name, value) in &call.arguments {
            let is_unpacked = matches!(
                value.first().map(|lexeme| &lexeme.token),
                Some(PyToken::Operator("*" | "**"))
            );
            match name {
                Some(name) => self.insert(name, value, options),
                None if is_unpacked => self.insert(&self.text(value), value, options),
                None if strict => {
                    let (line, name, text) = (call.line, call.name, self.text(value));
                    return Err(format!(
                        "line {line}: {name} has an argument without a name, {text:?}"
                    ));
                }
                None => {}
            }
        }
        Ok(())
    }

    /// The model and the reward functions of a trainer. Its other arguments are objects.
    fn trainer(&self, call: &PyCall<'_, '_>, options: &mut TrlOptions) {
        for (name, value) in &call.arguments {
            let line = value.first().map(|lexeme| lexeme.line);
            let given = match name {
                Some("model") => literal(value, &self.constants).filter(Value::is_string),
                Some("reward_funcs") => {
                    let inner = match *value {
                        [open, inner @ .., _] if open.token == PyToken::Operator("[") => inner,
                        single => single,
                    };
                    Some(items(inner).into_iter().map(|item| self.text(item)).collect())
                }
                _ => None,
            };
            if let (Some(name), Some(given)) = (name, given) {
                options.insert(name, Given::Literal(given), line);
            }
        }
    }

    /// The name, configuration and split of a dataset, or the file that it is read from.
    fn dataset(&self, call: &PyCall<'_, '_>, options: &mut TrlOptions) {
        let (mut position, mut is_named) = (0, false);
        let mut found = TrlOptions::default();
        for (keyword, value) in &call.arguments {
            let line = value.first().map(|lexeme| lexeme.line);
            let parameter = keyword.unwrap_or_else(|| {
                position += 1;
                if position == 1 { "path" } else { "name" }
            });
            let Some(value @ Value::String(_)) = literal(value, &self.constants) else { continue };
            let option = match parameter {
                // `load_dataset("csv", data_files="a.csv")`
                "path" if !["json", "csv", "parquet"].iter().any(|format| value == *format) => {
                    "dataset_name"
                }
                "data_files" => "dataset_name",
                "name" => "dataset_config",
                "split" => "dataset_train_split",
                _ => continue,
            };
            is_named |= option == "dataset_name";
            found.insert(option, Given::Literal(value), line);
        }
        // A second dataset does not complete the first.
        if is_named && !options.has("dataset_name") {
            options.extend(found);
        }
    }
}

// Literals of Python, read from tokens and never evaluated.

/// Names with their literals.
type Constants<'a> = BTreeMap<&'a str, Value>;

/// Lists within lists beyond this are not read, so that hostile files do not exhaust the stack.
const DEEPEST: usize = 32;

/// The value of an expression that is a literal, a list, tuple or dictionary of literals, or the name
/// of a constant; `None` for every other expression.
fn literal(tokens: &[Lexeme<'_>], constants: &Constants<'_>) -> Option<Value> {
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
            let text = |lexeme: &Lexeme<'_>| match &lexeme.token {
                PyToken::Text(text) => text.clone(),
                _ => None,
            };
            tokens.iter().map(text).collect::<Option<String>>().map(Value::from)
        }
        (PyToken::Operator("-"), [Lexeme { token: PyToken::Number(Some(number)), .. }]) => {
            match number.as_i64() {
                Some(whole) => whole.checked_neg().map(Value::from),
                None => number.as_f64().map(|x| Value::from(-x)),
            }
        }
        (PyToken::Operator("+"), [Lexeme { token: PyToken::Number(number), .. }]) => number.clone(),
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

/// The parts of a list between its commas, without an empty part after the last comma.
fn items<'t, 'a>(tokens: &'t [Lexeme<'a>]) -> Vec<&'t [Lexeme<'a>]> {
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
fn constants<'a>(tokens: &[Lexeme<'a>]) -> Constants<'a> {
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
