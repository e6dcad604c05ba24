//! The interface of `unit` for other processors and systems. Nothing here runs, because there is no
//! value of [`NoUnit`].

use super::{TileRow, UnpackedRows};

pub(crate) type Bf16Unit = NoUnit;

/// The proof that this process may use instructions for bf16, which it may not.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoUnit {}

/// What a thread multiplies with.
pub(super) struct NoRegisters;

impl NoUnit {
    pub fn get() -> Option<Self> {
        None
    }

    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    pub fn uses_vectors(self) -> bool {
        match self {}
    }

    pub(super) fn registers(self) -> NoRegisters {
        match self {}
    }

    pub(super) unsafe fn pack_rows(
        self,
        _: (*const f32, usize),
        _: (usize, usize),
        _: *mut TileRow,
    ) {
        match self {}
    }

    pub(super) unsafe fn pack_transposed(
        self,
        _: UnpackedRows<'_>,
        _: (usize, usize),
        _: *mut TileRow,
    ) {
        match self {}
    }

    pub(super) unsafe fn pack_pairs(
        self,
        _: UnpackedRows<'_>,
        _: (usize, usize),
        _: *mut TileRow,
        _: usize,
    ) {
        match self {}
    }
}

impl NoRegisters {
    pub(super) unsafe fn multiply(
        &self,
        _: (*const TileRow, *const TileRow),
        _: usize,
        _: (*mut f32, usize),
        _: bool,
    ) {
    }
}
