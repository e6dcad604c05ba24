//! Floats stored as their bits, for `#[serde(with = "float_bits")]`. `serde_json` may parse a decimal
//! that it wrote to a neighboring float, but a resumed run must continue with the same numbers.

use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(x: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(x.to_bits())
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    u64::deserialize(d).map(f64::from_bits)
}
