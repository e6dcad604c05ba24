//! Kinds that run programs, ask services and models, or take values from clients.
//!
//! Their implementations, with the parameters, are in modules of their own at the crate's root.

pub mod code;
pub mod code_syntax;
pub mod feedback;
pub mod grader;
pub mod judge;
pub mod python;
pub mod script;
pub mod webhook;
