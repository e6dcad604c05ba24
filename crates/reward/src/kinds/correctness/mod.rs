//! Kinds that compare the completion with a reference.

pub mod contains;
pub mod exact_match;
pub mod fuzzy_match;
pub mod keywords;
pub mod math_equal;
pub mod multiple_choice;
pub mod numeric_match;
pub mod reasoning_accuracy;
pub mod text_similarity;
