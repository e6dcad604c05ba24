//! Helpers for configuration sections: error sentences, ranges and secrets.
//!
//! Each crate owns the section that configures it and checks its ranges with [`range`]. The root
//! package joins the sections, and is the only place that reads the environment.

pub mod describe;
pub mod range;
pub mod secret;

pub use describe::Problem;
pub use range::{Checked, label, quoted};
pub use secret::Secret;
