//! What the whole configuration accepts and refuses, section by section.

mod advice;
mod dataset;
mod objective;
mod shipped;
