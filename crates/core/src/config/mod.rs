//! Helpers for configuration sections: ranges, secrets, and errors that name the key.
//!
//! Each crate defines the section that configures it and checks its values with [`range`]. The root
//! package joins the sections, and is the only place that reads the environment.

pub mod compute;
pub mod describe;
pub mod range;
pub mod secret;

pub use compute::Compute;
pub use describe::Problem;
pub use range::{Checked, label, quoted};
pub use secret::Secret;
