//! `hone bench`: what this machine makes of hone's parts. Times vary with what else it does, so the
//! figures are told, and compared with each other, in one run.

pub mod machine;
pub mod rewards;
pub mod sample;
pub mod train;
