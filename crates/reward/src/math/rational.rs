//! Numbers that are exact fractions of 128-bit integers while they fit.

use num_integer::Roots;
use num_rational::Ratio;
use num_traits::{CheckedAdd, CheckedMul, checked_pow};

/// An exact fraction in lowest terms. Its numerator is not `i128::MIN`, so that its sign can be changed.
pub type Rational = Ratio<i128>;

/// The fraction, if its sign can be changed.
fn kept(value: Rational) -> Option<Rational> {
    (*value.numer() != i128::MIN).then_some(value)
}

fn nearest(value: Rational) -> f64 {
    *value.numer() as f64 / *value.denom() as f64
}

/// The exact n-th root, if it is a fraction; `n >= 1`.
fn exact_root(value: Rational, n: u32) -> Option<Rational> {
    let root = |value: &i128| {
        let is_real = *value >= 0 || n % 2 == 1;
        let root = is_real.then(|| value.nth_root(n))?;
        (root.checked_pow(n) == Some(*value)).then_some(root)
    };
    Some(Rational::new(root(value.numer())?, root(value.denom())?))
}

fn exact_power(base: Rational, power: Rational) -> Option<Rational> {
    let n = u32::try_from(power.numer().unsigned_abs()).ok()?;
    let base = match *power.denom() {
        1 => base,
        root => exact_root(base, u32::try_from(root).ok()?)?,
    };
    let raised = kept(checked_pow(base, usize::try_from(n).ok()?)?)?;
    Some(if *power.numer() < 0 { raised.recip() } else { raised })
}

/// A number, exact while it is a fraction that fits, else a finite float.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An exact fraction.
    Exact(Rational),
    /// A finite float, and the most that it may differ from the true value by rounding.
    Near(f64, f64),
}

impl Number {
    /// A whole number.
    pub fn whole(value: i128) -> Option<Self> {
        kept(value.into()).map(Self::Exact)
    }

    /// A finite float that is rounded once; `None` for any other.
    pub fn near(value: f64) -> Option<Self> {
        Self::rounded(value, 0.0)
    }

    /// A result of floats with this error before its own rounding.
    fn rounded(value: f64, error: f64) -> Option<Self> {
        let error = error + f64::EPSILON * value.abs();
        (value.is_finite() && error.is_finite()).then_some(Self::Near(value, error))
    }

    /// The nearest float.
    pub fn to_f64(self) -> f64 {
        match self {
            Self::Exact(value) => nearest(value),
            Self::Near(value, _) => value,
        }
    }

    fn error(self) -> f64 {
        match self {
            Self::Exact(value) => f64::EPSILON * nearest(value).abs(),
            Self::Near(_, error) => error,
        }
    }

    /// The error relative to the value.
    fn relative_error(self) -> f64 {
        if self.is_zero() { 0.0 } else { self.error() / self.to_f64().abs() }
    }

    fn is_zero(self) -> bool {
        self.to_f64() == 0.0
    }

    /// The sum.
    pub fn add(self, other: Self) -> Option<Self> {
        if let (Self::Exact(a), Self::Exact(b)) = (self, other)
            && let Some(value) = a.checked_add(&b).and_then(kept)
        {
            return Some(Self::Exact(value));
        }
        Self::rounded(self.to_f64() + other.to_f64(), self.error() + other.error())
    }

    /// The negative.
    pub fn negative(self) -> Option<Self> {
        Self::whole(-1)?.mul(self)
    }

    /// The product.
    pub fn mul(self, other: Self) -> Option<Self> {
        if let (Self::Exact(a), Self::Exact(b)) = (self, other)
            && let Some(value) = a.checked_mul(&b).and_then(kept)
        {
            return Some(Self::Exact(value));
        }
        let (a, b) = (self.to_f64(), other.to_f64());
        Self::rounded(a * b, a.abs() * other.error() + b.abs() * self.error())
    }

    /// The quotient; `None` for a divisor of 0.
    pub fn div(self, other: Self) -> Option<Self> {
        if other.is_zero() {
            return None;
        }
        let inverse = match other {
            Self::Exact(value) => Some(Self::Exact(value.recip())),
            Self::Near(value, error) => Self::rounded(value.recip(), error / (value * value)),
        };
        self.mul(inverse?)
    }

    /// The power; `None` where it is undefined or not real. `0^0` is 1.
    pub fn power(self, exponent: Self) -> Option<Self> {
        if let (Self::Exact(base), Self::Exact(power)) = (self, exponent) {
            if *base.numer() == 0 && *power.numer() < 0 {
                return None;
            }
            if let Some(value) = exact_power(base, power) {
                return Some(Self::Exact(value));
            }
        }
        let (base, power) = (self.to_f64(), exponent.to_f64());
        let value = base.powf(power);
        let by_power = if base > 0.0 { base.ln().abs() * exponent.error() } else { 0.0 };
        Self::rounded(value, value.abs() * (power.abs() * self.relative_error() + by_power))
    }

    /// The real n-th root, `n >= 1`; `None` for an even root of a negative number.
    pub fn root(self, n: u32) -> Option<Self> {
        if n == 0 {
            return None;
        }
        if let Self::Exact(value) = self
            && let Some(root) = exact_root(value, n)
        {
            return Some(Self::Exact(root));
        }
        let value = self.to_f64();
        let root = match n {
            2 => value.sqrt(),
            _ if n % 2 == 1 => value.signum() * value.abs().powf(1.0 / f64::from(n)),
            _ => value.powf(1.0 / f64::from(n)),
        };
        Self::rounded(root, root.abs() * self.relative_error())
    }

    /// Whether two exact numbers are equal, or others are near.
    pub fn equals(self, wanted: Self, tolerance: f64) -> bool {
        match (self, wanted) {
            (Self::Exact(a), Self::Exact(b)) => a == b,
            _ => self.is_near(wanted, tolerance),
        }
    }

    /// Whether two numbers differ by at most `tolerance` times the greater one, or by what their rounding explains.
    pub fn is_near(self, other: Self, tolerance: f64) -> bool {
        let (a, b) = (self.to_f64(), other.to_f64());
        (a - b).abs()
            <= (tolerance * a.abs().max(b.abs())).max(2.0 * (self.error() + other.error()))
    }
}
