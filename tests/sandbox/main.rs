//! The sandbox, which starts the binary as its launcher, and the rewards that execute code in it.

mod code_reward;
mod confinement;
mod guide_cases;
mod python_reward;
