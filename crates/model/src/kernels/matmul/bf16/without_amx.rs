//! The interface of `amx` for other processors and systems. Nothing here runs, because there is no
//! value of [`NoAmx`].

use super::layout::{TileRow, UnpackedRows};

pub(crate) type Amx = NoAmx;

/// The proof that this process may use AMX, which it may not.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NoAmx {}

/// The tile registers of a thread.
pub(super) struct NoTileRegisters;

impl NoAmx {
    pub fn get() -> Option<Self> {
        None
    }

    pub(super) fn registers(self) -> NoTileRegisters {
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

impl NoTileRegisters {
    pub(super) unsafe fn multiply(
        &self,
        _: (*const TileRow, *const TileRow),
        _: usize,
        _: (*mut f32, usize),
        _: bool,
    ) {
    }
}
