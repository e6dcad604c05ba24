//! The arithmetic of products with the matrices of the frozen base.

use serde::{Deserialize, Serialize};

/// The arithmetic of products with the matrices of a frozen base. Everything else, such as adapters,
/// attention and norms, is computed in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// In f32.
    #[default]
    F32,
    /// Both factors are rounded to bf16, and sums are in f32. Only some processors are faster with it; others
    /// compute in f32.
    Bf16,
}

impl Compute {
    /// All choices.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name in configurations and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_configuration() {
        for compute in Compute::ALL {
            let json = serde_json::to_string(&compute).unwrap();
            assert_eq!(json, format!("{:?}", compute.as_str()));
        }
    }
}
