//! Sequences laid end to end, without padding, prompts shared.

type Result<T> = candle_core::Result<T>;

/// Consecutive tokens of one sequence, or of one branch of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of its first token.
    pub start: usize,
    /// Tokens; may be 0.
    pub len: usize,
    /// The segment that it continues: its tokens see all of that one's, and their positions go on
    /// from there.
    pub prefix: Option<usize>,
}

/// A prefix and the segments that continue it: consecutive tokens that see no others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PrefixGroup {
    pub start: usize,
    pub len: usize,
    /// Tokens of the prefix, the family's first ones.
    pub prefix: usize,
    /// `(start, len)` of the branches.
    pub branches: Vec<(usize, usize)>,
}

/// The segments of one forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    tokens: usize,
    families: Vec<PrefixGroup>,
}

impl Segments {
    /// Checks a table of segments: they lie end to end, and every branch follows its prefix or
    /// another branch of it.
    ///
    /// # Errors
    /// If they do not.
    pub fn new(table: &[Segment]) -> Result<Self> {
        let mut families: Vec<(usize, PrefixGroup)> = Vec::new();
        let mut tokens = 0;
        for (index, segment) in table.iter().enumerate() {
            if segment.start != tokens {
                candle_core::bail!("segment {index} starts at {}, not {tokens}", segment.start);
            }
            tokens += segment.len;
            match (segment.prefix, families.last_mut()) {
                (None, _) => {
                    let (start, len) = (segment.start, segment.len);
                    let family = PrefixGroup { start, len, prefix: len, branches: Vec::new() };
                    families.push((index, family));
                }
                (Some(prefix), Some((root, family))) if prefix == *root => {
                    family.len += segment.len;
                    family.branches.push((segment.start, segment.len));
                }
                _ => candle_core::bail!("segment {index} does not follow its prefix"),
            }
        }
        Ok(Self { tokens, families: families.into_iter().map(|(_, family)| family).collect() })
    }

    /// `batch` sequences of `len` tokens each, none of which shares anything.
    pub fn batch(batch: usize, len: usize) -> Self {
        let family = |b| PrefixGroup { start: b * len, len, prefix: len, branches: Vec::new() };
        Self { tokens: batch * len, families: (0..batch).map(family).collect() }
    }

    /// Tokens of all segments.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn families(&self) -> &[PrefixGroup] {
        &self.families
    }

    /// The position of every token in its sequence.
    pub fn positions(&self) -> Vec<usize> {
        let mut positions = Vec::with_capacity(self.tokens);
        for family in &self.families {
            positions.extend(0..family.prefix);
            for (_, len) in &family.branches {
                positions.extend(family.prefix..family.prefix + len);
            }
        }
        positions
    }
}
