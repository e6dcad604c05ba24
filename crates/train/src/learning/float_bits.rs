//! Floats as their bits: `serde_json` may read back a neighbour of the decimal it wrote, and a resumed
//! run must go on from the same numbers. For `#[serde(with = "bits")]`.

use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(x: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(x.to_bits())
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    u64::deserialize(d).map(f64::from_bits)
}
