//! A ledger that is only read: its file stays byte for byte the same.

use std::path::Path;

use redb::{ReadOnlyDatabase, ReadTransaction, ReadableDatabase, ReadableTable};

use hone_core::types::{
    Group, Interaction, InteractionId, PolicyRecord, Rating, Reward, Sample, SampleId,
};

use crate::error::StoreError;
use crate::format;
use crate::op::QuarantinedKey;
use crate::store::Store;
use crate::{file, migrate, reader};

/// Where the records of a group are read from.
///
/// # Errors
/// Every query fails if the file or a record cannot be read.
pub trait RecordSource {
    /// One prompt.
    fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError>;
    /// One completion.
    fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError>;
    /// Every reward part of a completion, by name.
    fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError>;
    /// Each rater's newest rating of a completion and part.
    fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError>;
}

impl RecordSource for Store {
    fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        Self::interaction(self, id)
    }

    fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        Self::sample(self, id)
    }

    fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        Self::rewards_of(self, id)
    }

    fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError> {
        Self::ratings_of(self, id, name)
    }
}

/// A snapshot of a ledger whose file no process has open for writing.
pub struct LedgerReader {
    /// Declared first, so that it is dropped before the file is closed.
    tx: ReadTransaction,
    _database: ReadOnlyDatabase,
}

impl LedgerReader {
    /// Opens a file of the current schema. Until it is dropped, no process can open the file for
    /// writing.
    ///
    /// # Errors
    /// `InUse` while a server has it open, `NotClosed` after a crash, `NewerSchema`, `OlderSchema`, or
    /// why the file cannot be read.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let database = file::open_read_only(path)?;
        migrate::require_current(&database)?;
        Ok(Self { tx: database.begin_read()?, _database: database })
    }

    /// Every group in any state, oldest first.
    pub fn groups(&self) -> Result<Vec<Group>, StoreError> {
        let mut found = Vec::new();
        reader::each(&self.tx.open_table(format::GROUPS)?, |_, group: Result<Group, _>| {
            found.push(group?);
            Ok(())
        })?;
        Ok(found)
    }

    /// The digests of the prompts that only exams use, of all routes.
    pub fn held_out_prompts(&self) -> Result<Vec<[u8; 16]>, StoreError> {
        let rows = self.tx.open_table(format::INTERACTIONS)?;
        let mut found = Vec::new();
        for entry in self.tx.open_table(format::HELD_OUT)?.iter()? {
            let prompt: Option<Interaction> = reader::get(&rows, entry?.0.value().1)?;
            found.extend(prompt.map(|prompt| prompt.prompt_digest()));
        }
        Ok(found)
    }

    /// Quarantined API keys, by id.
    pub fn quarantined(&self) -> Result<Vec<QuarantinedKey>, StoreError> {
        reader::quarantined(&self.tx)
    }

    /// Every policy version, in order.
    pub fn policies(&self) -> Result<Vec<PolicyRecord>, StoreError> {
        reader::from_number(&self.tx, format::POLICIES, 0, usize::MAX)
    }
}

impl RecordSource for LedgerReader {
    fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        reader::find(&self.tx, format::INTERACTIONS, id.0.as_bytes())
    }

    fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        reader::find(&self.tx, format::SAMPLES, id.0.as_bytes())
    }

    fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        reader::rewards_of(&self.tx.open_table(format::REWARDS)?, id)
    }

    fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError> {
        let feedback = self.tx.open_table(format::FEEDBACK)?;
        reader::ratings(&self.tx.open_table(format::RATINGS)?, &feedback, id, name)
    }
}
