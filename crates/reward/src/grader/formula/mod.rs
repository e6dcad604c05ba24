//! The formulas of `multi` graders: `calculate_output`.
//!
//! `+ - * /`, `^` or `**` (binding to the right, and tighter than a sign before it), brackets, and
//! `min max abs floor ceil exp sqrt log` (natural) over numbers and the graders' names.
//!
//! A formula is parsed once into a list of operations for a stack, so neither running nor dropping
//! one recurses; parsing recurses at most [`DEEPEST`] deep.

/// Longest formula, in characters.
pub const LONGEST: usize = 4096;
/// Deepest nesting of brackets, signs and powers.
pub const DEEPEST: usize = 64;

const FUNCTIONS: [(&str, Function); 8] = [
    ("min", Function::Min),
    ("max", Function::Max),
    ("abs", Function::Abs),
    ("floor", Function::Floor),
    ("ceil", Function::Ceil),
    ("exp", Function::Exp),
    ("sqrt", Function::Sqrt),
    ("log", Function::Log),
];

/// What is wrong with a formula; characters are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormulaError {
    /// More than `LONGEST` characters.
    #[error("the formula has {0} characters: it may have {LONGEST}")]
    TooLong(usize),
    /// Nested deeper than `DEEPEST`.
    #[error("the formula is nested more than {DEEPEST} deep at character {0}")]
    TooDeep(usize),
    /// Something stands where it cannot.
    #[error("{found} at character {at}: {wanted} must stand there")]
    Unexpected {
        /// What stands there.
        found: String,
        /// Where.
        at: usize,
        /// What could.
        wanted: &'static str,
    },
    /// A name that is no grader's.
    #[error("unknown name {name:?} at character {at}: the graders are {known}")]
    UnknownName {
        /// The name.
        name: String,
        /// Where.
        at: usize,
        /// The graders.
        known: String,
    },
    /// A name before a bracket that is no function's.
    #[error("unknown function {name:?} at character {at}: the functions are {known}")]
    UnknownFunction {
        /// The name.
        name: String,
        /// Where.
        at: usize,
        /// The functions.
        known: String,
    },
    /// A function of one value that is given several.
    #[error("{name} at character {at} has {given} values: it takes 1")]
    Values {
        /// The function.
        name: &'static str,
        /// Where.
        at: usize,
        /// How many it is given.
        given: usize,
    },
}

/// Why a formula has no value for one sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormulaFault {
    /// A grader it names has none.
    #[error("the grader {0:?} gave no value")]
    Missing(String),
    /// `x / 0`.
    #[error("division by zero")]
    DivisionByZero,
    /// Such as the root of a negative number, `log(0)` or `exp(1000)`.
    #[error("the result is not a finite number")]
    NotFinite,
}

/// A formula that was found right.
#[derive(Clone, Debug)]
pub struct Formula {
    /// In the order of running.
    operations: Vec<Operation>,
    names: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Number(f64),
    /// A grader, by its place in `names`.
    Grader(usize),
    Negate,
    Binary(char),
    Call(Function, usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Min,
    Max,
    Abs,
    Floor,
    Ceil,
    Exp,
    Sqrt,
    Log,
}

impl Formula {
    /// Reads a formula over graders of these names.
    ///
    /// # Errors
    /// Says what is wrong and where.
    pub fn parse(text: &str, names: &[&str]) -> Result<Self, FormulaError> {
        let text: Vec<char> = text.chars().collect();
        if text.len() > LONGEST {
            return Err(FormulaError::TooLong(text.len()));
        }
        let mut parser = Parser { text: &text, at: 0, depth: 0, names, operations: Vec::new() };
        parser.sum()?;
        parser.space();
        if parser.at < text.len() {
            return Err(parser.unexpected("an operator or the end"));
        }
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Ok(Self { operations: parser.operations, names })
    }

    /// The value for the graders' values, in the order of their names.
    ///
    /// # Errors
    /// If it has none; what comes out otherwise is finite.
    pub fn evaluate(&self, values: &[Option<f64>]) -> Result<f64, FormulaFault> {
        let mut stack: Vec<f64> = Vec::new();
        for operation in &self.operations {
            let value = match *operation {
                Operation::Number(number) => number,
                Operation::Grader(at) => values.get(at).copied().flatten().ok_or_else(|| {
                    FormulaFault::Missing(self.names.get(at).cloned().unwrap_or_default())
                })?,
                Operation::Negate => -pop(&mut stack)?,
                Operation::Binary(operator) => {
                    let (right, left) = (pop(&mut stack)?, pop(&mut stack)?);
                    binary(operator, left, right)?
                }
                Operation::Call(function, count) => {
                    let first = stack.len().saturating_sub(count);
                    let value = function.of(&stack[first..]);
                    stack.truncate(first);
                    value
                }
            };
            if !value.is_finite() {
                return Err(FormulaFault::NotFinite);
            }
            stack.push(value);
        }
        pop(&mut stack)
    }
}

/// The parser leaves nothing to pop from an empty stack; if it did, there would be no value.
fn pop(stack: &mut Vec<f64>) -> Result<f64, FormulaFault> {
    stack.pop().ok_or(FormulaFault::NotFinite)
}

fn binary(operator: char, left: f64, right: f64) -> Result<f64, FormulaFault> {
    Ok(match operator {
        '+' => left + right,
        '-' => left - right,
        '*' => left * right,
        '/' if right == 0.0 => return Err(FormulaFault::DivisionByZero),
        '/' => left / right,
        _ => left.powf(right),
    })
}

impl Function {
    fn of(self, values: &[f64]) -> f64 {
        let first = values.first().copied().unwrap_or(f64::NAN);
        match self {
            Self::Min => values.iter().copied().fold(first, f64::min),
            Self::Max => values.iter().copied().fold(first, f64::max),
            Self::Abs => first.abs(),
            Self::Floor => first.floor(),
            Self::Ceil => first.ceil(),
            Self::Exp => first.exp(),
            Self::Sqrt => first.sqrt(),
            Self::Log => first.ln(),
        }
    }
}

struct Parser<'a> {
    text: &'a [char],
    at: usize,
    depth: usize,
    names: &'a [&'a str],
    operations: Vec<Operation>,
}

impl Parser<'_> {
    fn sum(&mut self) -> Result<(), FormulaError> {
        self.product()?;
        while let Some(operator) = self.take(&['+', '-']) {
            self.product()?;
            self.operations.push(Operation::Binary(operator));
        }
        Ok(())
    }

    fn product(&mut self) -> Result<(), FormulaError> {
        self.signed()?;
        while let Some(operator) = self.take(&['*', '/']) {
            self.signed()?;
            self.operations.push(Operation::Binary(operator));
        }
        Ok(())
    }

    /// Everything nested passes here.
    fn signed(&mut self) -> Result<(), FormulaError> {
        if self.depth == DEEPEST {
            return Err(FormulaError::TooDeep(self.at + 1));
        }
        self.depth += 1;
        match self.take(&['-', '+']) {
            Some(sign) => {
                self.signed()?;
                if sign == '-' {
                    self.operations.push(Operation::Negate);
                }
            }
            None => self.power()?,
        }
        self.depth -= 1;
        Ok(())
    }

    fn power(&mut self) -> Result<(), FormulaError> {
        self.value()?;
        self.space();
        let rest = self.text.get(self.at..).unwrap_or_default();
        self.at += match rest {
            ['^', ..] => 1,
            ['*', '*', ..] => 2,
            _ => return Ok(()),
        };
        self.signed()?;
        self.operations.push(Operation::Binary('^'));
        Ok(())
    }

    fn value(&mut self) -> Result<(), FormulaError> {
        self.space();
        match self.text.get(self.at) {
            Some('(') => {
                self.at += 1;
                self.sum()?;
                self.close("an operator or \")\"")
            }
            Some(c) if c.is_ascii_digit() || *c == '.' => self.number(),
            Some(c) if c.is_alphabetic() || *c == '_' => self.name(),
            _ => Err(self.unexpected("a number, a grader's name, a function or \"(\"")),
        }
    }

    fn number(&mut self) -> Result<(), FormulaError> {
        let from = self.at;
        let digits = |parser: &mut Self| {
            parser.word(|c| c.is_ascii_digit());
        };
        digits(self);
        if self.text.get(self.at) == Some(&'.') {
            self.at += 1;
            digits(self);
        }
        if let Some(['e' | 'E', rest @ ..]) = self.text.get(self.at..)
            && matches!(rest, ['0'..='9', ..] | ['+' | '-', '0'..='9', ..])
        {
            self.at += 2;
            digits(self);
        }
        let text: String = self.text[from..self.at].iter().collect();
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => {
                self.operations.push(Operation::Number(number));
                Ok(())
            }
            _ => {
                let wanted = "a finite number";
                Err(FormulaError::Unexpected { found: format!("{text:?}"), at: from + 1, wanted })
            }
        }
    }

    fn name(&mut self) -> Result<(), FormulaError> {
        let at = self.at + 1;
        let name = self.word(|c| c.is_alphanumeric() || c == '_');
        if self.take(&['(']).is_none() {
            let place = self.names.iter().position(|known| *known == name);
            let known = || self.names.join(", ");
            let place =
                place.ok_or_else(|| FormulaError::UnknownName { name, at, known: known() })?;
            self.operations.push(Operation::Grader(place));
            return Ok(());
        }
        let Some((name, function)) = FUNCTIONS.into_iter().find(|(known, _)| *known == name) else {
            let known = FUNCTIONS.map(|(name, _)| name).join(", ");
            return Err(FormulaError::UnknownFunction { name, at, known });
        };
        let mut given = 1;
        self.sum()?;
        while self.take(&[',']).is_some() {
            self.sum()?;
            given += 1;
        }
        self.close("an operator, \",\" or \")\"")?;
        if given > 1 && !matches!(function, Function::Min | Function::Max) {
            return Err(FormulaError::Values { name, at, given });
        }
        self.operations.push(Operation::Call(function, given));
        Ok(())
    }

    fn word(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let word: String = rest.iter().copied().take_while(|c| belongs(*c)).collect();
        self.at += word.chars().count();
        word
    }

    /// One of these characters, if it stands next.
    fn take(&mut self, wanted: &[char]) -> Option<char> {
        self.space();
        let next = *self.text.get(self.at)?;
        wanted.contains(&next).then(|| self.at += 1)?;
        Some(next)
    }

    fn close(&mut self, wanted: &'static str) -> Result<(), FormulaError> {
        self.take(&[')']).map(|_| ()).ok_or_else(|| self.unexpected(wanted))
    }

    fn space(&mut self) {
        while self.text.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    fn unexpected(&self, wanted: &'static str) -> FormulaError {
        let found =
            self.text.get(self.at).map_or("the end".to_owned(), |c| format!("{:?}", c.to_string()));
        FormulaError::Unexpected { found, at: self.at + 1, wanted }
    }
}

#[cfg(test)]
mod tests;
