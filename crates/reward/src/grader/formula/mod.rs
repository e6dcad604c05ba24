//! The formulas of `multi` graders: `calculate_output`.
//!
//! A formula has `+ - * /`, `^` or `**` (right-associative, with a higher precedence than a sign
//! before it), brackets, and `min max abs floor ceil exp sqrt log` (natural) over numbers and the
//! names of graders.
//!
//! A formula is parsed once into operations for a stack machine, so neither evaluation nor drop
//! recurses; the parser recurses at most `DEEPEST` levels.

use std::ops::{Add, Mul, Neg, Sub};

/// Maximum length of a formula in characters.
pub const LONGEST: usize = 4096;
/// Maximum nesting of brackets, signs and powers.
pub const DEEPEST: usize = 64;

const FUNCTIONS: [(&str, FormulaOp); 8] = [
    ("min", FormulaOp::Binary(f64::min)),
    ("max", FormulaOp::Binary(f64::max)),
    ("abs", FormulaOp::Unary(f64::abs)),
    ("floor", FormulaOp::Unary(f64::floor)),
    ("ceil", FormulaOp::Unary(f64::ceil)),
    ("exp", FormulaOp::Unary(f64::exp)),
    ("sqrt", FormulaOp::Unary(f64::sqrt)),
    ("log", FormulaOp::Unary(f64::ln)),
];

/// The error of a result that is infinite or undefined, as of `sqrt(-1)`, `log(0)` or `exp(1000)`.
fn not_finite() -> String {
    "the result is not a finite number".to_owned()
}

/// A valid formula.
#[derive(Clone, Debug)]
pub struct Formula {
    /// In postfix order.
    operations: Vec<FormulaOp>,
    names: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum FormulaOp {
    Number(f64),
    /// The value of a grader, by its index in `names`.
    Grader(usize),
    Unary(fn(f64) -> f64),
    Binary(fn(f64, f64) -> f64),
    /// Fails if the divisor is 0.
    Divide,
}

impl Formula {
    /// Parses a formula over graders with these names.
    /// Errors: the first error in the text, with its position; characters are counted from 1.
    pub fn parse(text: &str, names: &[&str]) -> Result<Self, String> {
        let text: Vec<char> = text.chars().collect();
        if text.len() > LONGEST {
            let length = text.len();
            return Err(format!("the formula has {length} characters: it may have {LONGEST}"));
        }
        let mut parser =
            FormulaParser { text: &text, at: 0, depth: 0, names, operations: Vec::new() };
        parser.sum()?;
        parser.space();
        if parser.at < text.len() {
            return Err(parser.unexpected("an operator or the end"));
        }
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Ok(Self { operations: parser.operations, names })
    }

    /// Computes the value from the graders' values, which are in the order of their names. The
    /// result is finite.
    /// Errors: if the formula has no value.
    pub fn evaluate(&self, values: &[Option<f64>]) -> Result<f64, String> {
        let mut stack: Vec<f64> = Vec::new();
        // The parser emits no operation that lacks an operand; if it did, there would be no value.
        let pop = |stack: &mut Vec<f64>| stack.pop().ok_or_else(not_finite);
        for operation in &self.operations {
            let value = match *operation {
                FormulaOp::Number(number) => number,
                FormulaOp::Grader(at) => values.get(at).copied().flatten().ok_or_else(|| {
                    let name = self.names.get(at).map_or("", String::as_str);
                    format!("the grader {name:?} gave no value")
                })?,
                FormulaOp::Unary(function) => function(pop(&mut stack)?),
                FormulaOp::Binary(function) => {
                    let (right, left) = (pop(&mut stack)?, pop(&mut stack)?);
                    function(left, right)
                }
                FormulaOp::Divide => match (pop(&mut stack)?, pop(&mut stack)?) {
                    (0.0, _) => return Err("division by zero".to_owned()),
                    (right, left) => left / right,
                },
            };
            if !value.is_finite() {
                return Err(not_finite());
            }
            stack.push(value);
        }
        pop(&mut stack)
    }
}

struct FormulaParser<'a> {
    text: &'a [char],
    at: usize,
    depth: usize,
    names: &'a [&'a str],
    operations: Vec<FormulaOp>,
}

impl FormulaParser<'_> {
    fn sum(&mut self) -> Result<(), String> {
        self.chain(
            &[('+', FormulaOp::Binary(f64::add)), ('-', FormulaOp::Binary(f64::sub))],
            Self::product,
        )
    }

    fn product(&mut self) -> Result<(), String> {
        self.chain(&[('*', FormulaOp::Binary(f64::mul)), ('/', FormulaOp::Divide)], Self::signed)
    }

    /// Parses operands that are joined by left-associative operators.
    fn chain(
        &mut self,
        operators: &[(char, FormulaOp)],
        operand: fn(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        operand(self)?;
        while let Some((_, operation)) = operators.iter().find(|(c, _)| self.take(*c)) {
            operand(self)?;
            self.operations.push(*operation);
        }
        Ok(())
    }

    /// Parses a power with signs before it. All nesting recurses through here.
    fn signed(&mut self) -> Result<(), String> {
        if self.depth == DEEPEST {
            let at = self.at + 1;
            return Err(format!(
                "the formula is nested more than {DEEPEST} deep at character {at}"
            ));
        }
        self.depth += 1;
        if self.take('-') {
            self.signed()?;
            self.operations.push(FormulaOp::Unary(f64::neg));
        } else if self.take('+') {
            self.signed()?;
        } else {
            self.power()?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn power(&mut self) -> Result<(), String> {
        self.value()?;
        self.space();
        let rest = self.text.get(self.at..).unwrap_or_default();
        self.at += match rest {
            ['^', ..] => 1,
            ['*', '*', ..] => 2,
            _ => return Ok(()),
        };
        self.signed()?;
        self.operations.push(FormulaOp::Binary(f64::powf));
        Ok(())
    }

    fn value(&mut self) -> Result<(), String> {
        if self.take('(') {
            self.sum()?;
            return self.close("an operator or \")\"");
        }
        match self.text.get(self.at) {
            Some(c) if c.is_ascii_digit() || *c == '.' => self.number(),
            Some(c) if c.is_alphabetic() || *c == '_' => self.name(),
            _ => Err(self.unexpected("a number, a grader's name, a function or \"(\"")),
        }
    }

    fn number(&mut self) -> Result<(), String> {
        let from = self.at;
        self.word(|c| c.is_ascii_digit());
        if self.text.get(self.at) == Some(&'.') {
            self.at += 1;
            self.word(|c| c.is_ascii_digit());
        }
        if let Some(['e' | 'E', rest @ ..]) = self.text.get(self.at..)
            && matches!(rest, ['0'..='9', ..] | ['+' | '-', '0'..='9', ..])
        {
            self.at += 2;
            self.word(|c| c.is_ascii_digit());
        }
        let text: String = self.text[from..self.at].iter().collect();
        let Some(number) = text.parse::<f64>().ok().filter(|number| number.is_finite()) else {
            let at = from + 1;
            return Err(format!("expected a finite number at character {at}, found {text:?}"));
        };
        self.operations.push(FormulaOp::Number(number));
        Ok(())
    }

    /// Parses the name of a grader, or a function with its arguments.
    fn name(&mut self) -> Result<(), String> {
        let at = self.at + 1;
        let name = self.word(|c| c.is_alphanumeric() || c == '_');
        if !self.take('(') {
            let index = self.names.iter().position(|known| *known == name);
            let index = index.ok_or_else(|| {
                let known = self.names.join(", ");
                format!("unknown name {name:?} at character {at}: the graders are {known}")
            })?;
            self.operations.push(FormulaOp::Grader(index));
            return Ok(());
        }
        let Some((name, function)) = FUNCTIONS.into_iter().find(|(known, _)| *known == name) else {
            let known = FUNCTIONS.map(|(name, _)| name).join(", ");
            return Err(format!(
                "unknown function {name:?} at character {at}: the functions are {known}"
            ));
        };
        let mut given = 1;
        self.sum()?;
        while self.take(',') {
            self.sum()?;
            given += 1;
            self.operations.push(function);
        }
        self.close("an operator, \",\" or \")\"")?;
        if let FormulaOp::Unary(_) = function {
            if given > 1 {
                return Err(format!("{name} at character {at} has {given} values: it takes 1"));
            }
            self.operations.push(function);
        }
        Ok(())
    }

    fn word(&mut self, belongs: impl Fn(char) -> bool) -> String {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let word: String = rest.iter().copied().take_while(|c| belongs(*c)).collect();
        self.at += word.chars().count();
        word
    }

    /// Consumes white space, and the next character if it is `wanted`.
    fn take(&mut self, wanted: char) -> bool {
        self.space();
        let found = self.text.get(self.at) == Some(&wanted);
        self.at += usize::from(found);
        found
    }

    fn close(&mut self, wanted: &str) -> Result<(), String> {
        if self.take(')') { Ok(()) } else { Err(self.unexpected(wanted)) }
    }

    fn space(&mut self) {
        while self.text.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    fn unexpected(&self, wanted: &str) -> String {
        let found =
            self.text.get(self.at).map_or("the end".to_owned(), |c| format!("{:?}", c.to_string()));
        format!("expected {wanted} at character {}, found {found}", self.at + 1)
    }
}

#[cfg(test)]
mod tests;
