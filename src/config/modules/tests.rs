//! PEFT's rules on names.

use super::*;
