//! The sandbox, which starts the binary as its launcher, and the rewards that execute code in it.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

mod code_reward;
mod confinement;
mod guide_cases;
mod python_reward;
