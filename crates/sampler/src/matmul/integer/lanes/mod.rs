//! Products for processors without AVX-512 VNNI: integers of 16 bits times bytes, with vectors that have a
//! value of each of 16 rows.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod formats;
mod kernel;
mod portable;
mod vectors;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::{run_avx_vnni, run_avx2};
pub(super) use formats::RowsFormat;
pub(super) use portable::run_portable;
