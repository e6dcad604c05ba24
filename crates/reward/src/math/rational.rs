//! Exact fractions of 128-bit integers, and numbers that are exact while they fit.

/// `num / den` in lowest terms, `den > 0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rational {
    num: i128,
    den: i128,
}

impl Rational {
    /// `num / den`; `None` for a denominator of 0 and on overflow.
    pub fn new(num: i128, den: i128) -> Option<Self> {
        if den == 0 || num == i128::MIN || den == i128::MIN {
            return None;
        }
        let divisor = gcd(num.unsigned_abs(), den.unsigned_abs()) as i128 * den.signum();
        Some(Self { num: num / divisor, den: den / divisor })
    }

    fn add(self, other: Self) -> Option<Self> {
        let left = self.num.checked_mul(other.den)?;
        let right = other.num.checked_mul(self.den)?;
        Self::new(left.checked_add(right)?, self.den.checked_mul(other.den)?)
    }

    fn mul(self, other: Self) -> Option<Self> {
        // Reducing across first avoids overflow.
        let a = Self::new(self.num, other.den)?;
        let b = Self::new(other.num, self.den)?;
        Self::new(a.num.checked_mul(b.num)?, a.den.checked_mul(b.den)?)
    }

    fn inverse(self) -> Option<Self> {
        Self::new(self.den, self.num)
    }

    fn to_f64(self) -> f64 {
        self.num as f64 / self.den as f64
    }

    /// `self ^ n` by squaring.
    fn power(self, n: u32) -> Option<Self> {
        let (mut result, mut base, mut left) = (Self::new(1, 1)?, self, n);
        while left > 0 {
            if left & 1 == 1 {
                result = result.mul(base)?;
            }
            left >>= 1;
            if left > 0 {
                base = base.mul(base)?;
            }
        }
        Some(result)
    }

    /// The exact n-th root, if it is a fraction.
    fn root(self, n: u32) -> Option<Self> {
        Self::new(integer_root(self.num, n)?, integer_root(self.den, n)?)
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

/// The integer whose n-th power this is.
fn integer_root(value: i128, n: u32) -> Option<i128> {
    if value < 0 && n.is_multiple_of(2) {
        return None;
    }
    let near = (value.unsigned_abs() as f64).powf(1.0 / f64::from(n)).round() as i128;
    let sign = value.signum();
    // For large values the estimate may be off by a little.
    (near.saturating_sub(2).max(0)..=near.saturating_add(2))
        .map(|root| root * if n % 2 == 1 { sign } else { 1 })
        .find(|root| root.checked_pow(n) == Some(value))
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
        Rational::new(value, 1).map(Self::Exact)
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
            Self::Exact(value) => value.to_f64(),
            Self::Near(value, _) => value,
        }
    }

    fn error(self) -> f64 {
        match self {
            Self::Exact(value) => f64::EPSILON * value.to_f64().abs(),
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
            && let Some(value) = a.add(b)
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
            && let Some(value) = a.mul(b)
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
            Self::Exact(value) => value.inverse().map(Self::Exact),
            Self::Near(value, error) => Self::rounded(value.recip(), error / (value * value)),
        };
        self.mul(inverse?)
    }

    /// The power; `None` where it is undefined or not real. `0^0` is 1.
    pub fn power(self, exponent: Self) -> Option<Self> {
        if let (Self::Exact(base), Self::Exact(power)) = (self, exponent) {
            if base.num == 0 && power.num < 0 {
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
            && let Some(root) = value.root(n)
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

fn exact_power(base: Rational, power: Rational) -> Option<Rational> {
    let n = u32::try_from(power.num.unsigned_abs()).ok()?;
    let base = if power.den == 1 { base } else { base.root(u32::try_from(power.den).ok()?)? };
    let raised = base.power(n)?;
    if power.num < 0 { raised.inverse() } else { Some(raised) }
}
