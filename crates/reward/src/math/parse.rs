//! Reads a number, a fraction or an arithmetic expression, with variables on request, in plain or LaTeX notation.
//!
//! Recursive descent over characters, in time linear in the text; depth and length are bounded.
//!
//! ```text
//! sum     = product (("+" | "-") product)*
//! product = signed (("*" | "/" | nothing) signed)*
//! signed  = ("+" | "-")* power
//! power   = postfix ("^" signed)?
//! postfix = atom "%"*
//! atom    = number | mixed number | \frac a b | \sqrt[n] a | \pi | "(" sum ")" | "{" sum "}"
//! ```

use super::rational::{Number, Rational};

/// Deepest nesting of brackets, roots, fractions and powers.
const DEEPEST: u32 = 48;
/// Longest expression, in characters.
const LONGEST: usize = 1024;

/// Reads a whole text that [`super::tidy`] has normalized; `None` for anything but an expression
/// with a finite real value. Single letters are variables, whose numbers depend on `point`; there are none at
/// point 0.
pub fn value(text: &str, point: u32) -> Option<Number> {
    let chars: Vec<char> = text.chars().take(LONGEST + 1).collect();
    if chars.len() > LONGEST {
        return None;
    }
    let mut parser = ExpressionParser { chars: &chars, at: 0, depth: 0, point };
    let value = parser.sum()?;
    parser.space();
    (parser.at == chars.len()).then_some(value)
}

struct ExpressionParser<'a> {
    chars: &'a [char],
    at: usize,
    depth: u32,
    point: u32,
}

impl ExpressionParser<'_> {
    fn space(&mut self) {
        while self.chars.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    /// The next character that is not white space.
    fn peek(&mut self) -> Option<char> {
        self.space();
        self.chars.get(self.at).copied()
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    /// Takes a command such as `\frac`, or a name such as `pi`, that no letter follows.
    fn word(&mut self, word: &str) -> bool {
        self.space();
        let (rest, length) = (&self.chars[self.at..], word.chars().count());
        let is_next = word.chars().eq(rest.iter().take(length).copied())
            && !rest.get(length).is_some_and(|c| c.is_alphabetic());
        self.at += if is_next { length } else { 0 };
        is_next
    }

    fn nested(&mut self, read: impl FnOnce(&mut Self) -> Option<Number>) -> Option<Number> {
        if self.depth >= DEEPEST {
            return None;
        }
        self.depth += 1;
        let value = read(self);
        self.depth -= 1;
        value
    }

    fn sum(&mut self) -> Option<Number> {
        let mut value = self.product()?;
        loop {
            if self.take('+') {
                value = value.add(self.product()?)?;
            } else if self.take('-') {
                value = value.add(self.product()?.negative()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn product(&mut self) -> Option<Number> {
        let mut value = self.signed()?;
        loop {
            if self.take('*') {
                value = value.mul(self.signed()?)?;
            } else if self.take('/') {
                value = value.div(self.signed()?)?;
            } else if self.peek().is_some_and(|c| {
                matches!(c, '(' | '{' | '\\' | 'p' | 'π' | '√')
                    || (self.point > 0 && c.is_alphabetic())
            }) {
                // `2(3)`, `2\pi`; a digit may not follow: `1 2` is not a product.
                value = value.mul(self.power()?)?;
            } else {
                return Some(value);
            }
        }
    }

    fn signed(&mut self) -> Option<Number> {
        let mut negative = false;
        loop {
            if self.take('-') {
                negative = !negative;
            } else if !self.take('+') {
                break;
            }
        }
        let value = self.power()?;
        if negative { value.negative() } else { Some(value) }
    }

    fn power(&mut self) -> Option<Number> {
        let base = self.postfix()?;
        if !self.take('^') {
            return Some(base);
        }
        // Right-associative: the exponent may be a power itself.
        base.power(self.nested(Self::signed)?)
    }

    fn postfix(&mut self) -> Option<Number> {
        let mut value = self.atom()?;
        while self.take('%') {
            value = value.div(Number::whole(100)?)?;
        }
        Some(value)
    }

    fn atom(&mut self) -> Option<Number> {
        match self.peek()? {
            '(' => self.bracket('(', ')'),
            '{' => self.bracket('{', '}'),
            '0'..='9' | '.' => self.number_or_mixed(),
            'π' => {
                self.at += 1;
                Number::near(std::f64::consts::PI)
            }
            '√' => {
                self.at += 1;
                self.nested(Self::atom)?.root(2)
            }
            _ if self.word("\\pi") || self.word("pi") => Number::near(std::f64::consts::PI),
            _ if self.word("\\frac") => self.fraction(),
            _ if self.word("\\sqrt") => self.root(),
            c if self.point > 0 && c.is_alphabetic() => self.variable(c),
            _ => None,
        }
    }

    /// A letter as a number between 0.5 and 1.5, negative at point 3 and for half of the letters at point 4. Three
    /// letters or more are a word, as are `no` and `on`, which would be the same product.
    fn variable(&mut self, letter: char) -> Option<Number> {
        let rest = &self.chars[self.at..];
        let run = rest.iter().take_while(|c| c.is_alphabetic()).count();
        if run > 2 || (run == 2 && matches!(rest[..2], ['n', 'o'] | ['o', 'n'])) {
            return None;
        }
        self.at += 1;
        // SplitMix64's finalizer: sums of letters must not coincide.
        let mut bits =
            (u64::from(letter) << 8 | u64::from(self.point)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let magnitude = 0.5 + f64::from((bits >> 40) as u32) / f64::from(1_u32 << 24);
        let is_negative = self.point == 3 || (self.point == 4 && bits & 1 == 1);
        Number::near(if is_negative { -magnitude } else { magnitude })
    }

    fn bracket(&mut self, open: char, close: char) -> Option<Number> {
        if !self.take(open) {
            return None;
        }
        let value = self.nested(Self::sum)?;
        self.take(close).then_some(value)
    }

    /// The argument of a command: a group, a single digit (`\frac12`) or a command.
    fn argument(&mut self) -> Option<Number> {
        match self.peek()? {
            '{' => self.bracket('{', '}'),
            digit @ '0'..='9' => {
                self.at += 1;
                Number::whole(i128::from(digit.to_digit(10)?))
            }
            _ => self.nested(Self::atom),
        }
    }

    fn fraction(&mut self) -> Option<Number> {
        let above = self.argument()?;
        above.div(self.argument()?)
    }

    fn root(&mut self) -> Option<Number> {
        let mut n: u32 = 2;
        if self.take('[') {
            self.space();
            let mut digits = String::new();
            self.digits(&mut digits);
            n = digits.parse().ok().filter(|n| (1..=1000).contains(n))?;
            if !self.take(']') {
                return None;
            }
        }
        self.argument()?.root(n)
    }

    /// A number, or the sum of a mixed number (`1\frac12`, `1 1/2`).
    fn number_or_mixed(&mut self) -> Option<Number> {
        let (number, is_whole) = self.number()?;
        if !is_whole {
            return Some(number);
        }
        let before = self.at;
        if self.word("\\frac") {
            return number.add(self.fraction()?);
        }
        // `word` has skipped the white space, without which the digits would be one number.
        if self.at > before
            && self.peek().is_some_and(|c| c.is_ascii_digit())
            && let Some((above, true)) = self.number()
            && self.take('/')
            && self.peek().is_some_and(|c| c.is_ascii_digit())
            && let Some((below, true)) = self.number()
        {
            return number.add(above.div(below)?);
        }
        self.at = before;
        Some(number)
    }

    /// Digits with thousands separators, fraction and exponent; and whether the number is whole.
    fn number(&mut self) -> Option<(Number, bool)> {
        let mut digits = String::new();
        self.digits(&mut digits);
        let first = digits.len();
        while (1..=3).contains(&first) && self.separated_group() {
            self.at += 1;
            self.digits(&mut digits);
        }
        let whole = digits.len();
        if self.chars.get(self.at) == Some(&'.') {
            self.at += 1;
            self.digits(&mut digits);
        }
        if digits.is_empty() {
            return None;
        }
        let fraction = digits.len() - whole;
        let exponent = self.exponent()?;
        let number = scaled(&digits, exponent - i64::try_from(fraction).ok()?)?;
        Some((number, fraction == 0 && exponent == 0))
    }

    fn digits(&mut self, into: &mut String) {
        while let Some(digit) = self.chars.get(self.at).filter(|c| c.is_ascii_digit()) {
            into.push(*digit);
            self.at += 1;
        }
    }

    /// Whether a comma with exactly three digits follows.
    fn separated_group(&self) -> bool {
        let is_digit = |i: usize| self.chars.get(self.at + i).is_some_and(char::is_ascii_digit);
        self.chars.get(self.at) == Some(&',') && (1..=3).all(is_digit) && !is_digit(4)
    }

    /// The exponent of `e-7`; 0 where there is none.
    fn exponent(&mut self) -> Option<i64> {
        let signed = |c: &char| *c == '-' || *c == '+';
        if !self.chars.get(self.at).is_some_and(|c| matches!(c, 'e' | 'E')) {
            return Some(0);
        }
        let from = self.at + 1;
        let mut end = from + usize::from(self.chars.get(from).is_some_and(signed));
        while self.chars.get(end).is_some_and(char::is_ascii_digit) {
            end += 1;
        }
        let text: String = self.chars[from..end].iter().collect();
        self.at = end;
        text.parse().ok().filter(|e| (-9999..=9999).contains(e))
    }
}

/// `digits * 10^exponent`: exact where it fits, else the nearest float.
fn scaled(digits: &str, exponent: i64) -> Option<Number> {
    let exact = || {
        let digits: i128 = digits.parse().ok()?;
        let ten = 10_i128.checked_pow(u32::try_from(exponent.unsigned_abs()).ok()?)?;
        match exponent {
            0.. => Some(Rational::from(digits.checked_mul(ten)?)),
            _ => Some(Rational::new(digits, ten)),
        }
    };
    match exact() {
        Some(value) => Some(Number::Exact(value)),
        None => Number::near(format!("{digits}e{exponent}").parse().ok()?),
    }
}
