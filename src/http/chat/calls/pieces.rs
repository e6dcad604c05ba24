//! The texts of a model's format as pieces of a grammar. Markers may be special tokens.

use serde_json::Value;

use hone_engine::grammar::{CallPiece, Thought};
use hone_engine::tools::{CallFraming, CallSyntax};
use hone_engine::{Codec, ToolFormat};

/// What calls consist of in one format, with the tokens of one model.
pub(super) struct FormatPieces<'c> {
    codec: &'c Codec,
    framing: CallFraming,
    syntax: CallSyntax,
}

impl<'c> FormatPieces<'c> {
    pub(super) fn new(codec: &'c Codec, format: ToolFormat) -> Self {
        Self { codec, framing: format.framing(), syntax: format.syntax() }
    }

    /// What begins the calls: its first piece is a marker, if it has any piece.
    pub(super) fn open(&self) -> Vec<CallPiece> {
        self.text(self.framing.open)
    }

    /// What is between two calls.
    pub(super) fn separator(&self) -> Vec<CallPiece> {
        self.text(self.framing.separator)
    }

    /// What ends the calls.
    pub(super) fn close(&self) -> Vec<CallPiece> {
        self.text(self.framing.close)
    }

    /// A call, with the schema of its arguments as a document of its own, so that its references are found.
    pub(super) fn call(&self, name: &str, schema: Value) -> Vec<CallPiece> {
        let (name, key) = (Value::from(name), Value::from(self.framing.arguments));
        vec![
            CallPiece::Text(format!("{{\"name\": {name}, {key}: ")),
            CallPiece::Json(schema),
            CallPiece::Text("}".to_owned()),
        ]
    }

    /// The reasoning before calls, if the model has think tags. `is_open`: the prompt has begun it.
    pub(super) fn thought(&self, is_open: bool) -> Option<Thought> {
        let tags = self.codec.think_tags()?;
        let open = (!is_open).then(|| self.marker(tags.open));
        Some(Thought { open, close: self.marker(tags.close) })
    }

    /// Texts that the parser of answers takes for the beginning of calls, other than [`Self::open`]. Special
    /// tokens are not among them, because no text contains them.
    pub(super) fn other_beginnings(&self) -> Vec<String> {
        let is_other = |begin: &&str| {
            !self.framing.open.starts_with(*begin) && self.codec.special_id(begin).is_none()
        };
        let others = self.syntax.begin.iter().copied().filter(is_other);
        others.map(str::to_owned).collect()
    }

    fn marker(&self, text: &str) -> CallPiece {
        match self.codec.special_id(text) {
            Some(id) => CallPiece::Token(id),
            None => CallPiece::Text(text.to_owned()),
        }
    }

    /// A text, with each of its markers as a piece of its own.
    fn text(&self, text: &str) -> Vec<CallPiece> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, marker, after)) = self.first_marker(rest) {
            add(&mut pieces, before);
            pieces.push(self.marker(marker));
            rest = after;
        }
        add(&mut pieces, rest);
        pieces
    }

    /// The first marker in a text, with the texts around it.
    fn first_marker<'t>(&self, text: &'t str) -> Option<(&'t str, &'static str, &'t str)> {
        let split = |marker: &&'static str| {
            let (before, after) = text.split_once(*marker)?;
            Some((before, *marker, after))
        };
        self.framing.markers.iter().filter_map(split).min_by_key(|(before, ..)| before.len())
    }
}

fn add(pieces: &mut Vec<CallPiece>, text: &str) {
    if !text.is_empty() {
        pieces.push(CallPiece::Text(text.to_owned()));
    }
}
