//! The parameters of a list.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use hone_core::types::{Interaction, InteractionId};

use crate::http::body::{Field, FieldTable, Fields, invalid};
use crate::http::error::ApiError;

/// Entries of a page unless the client wants another number.
const DEFAULT_LIMIT: usize = 20;
/// Largest number of entries of a page.
const MAX_LIMIT: usize = 100;
/// The part of a parameter's name before a key of `metadata`.
const METADATA: &str = "metadata[";

/// The parameters of a page.
const PAGE: &[Field] = &[
    Field::text("after", "The page begins after the entry with this id."),
    Field::json("limit", limit_schema, "Most entries of the page; default 20."),
    Field::one_of("order", &["asc", "desc"], "By time; default `asc`."),
];
/// The parameters of a page that begins with the newest entry by default.
pub(in crate::http) const NEWEST_PAGE: &[Field] = &[
    Field::text("after", "The page begins after the entry with this id."),
    Field::json("limit", limit_schema, "Most entries of the page; default 20."),
    Field::one_of("order", &["asc", "desc"], "By time; default `desc`."),
];
/// The parameters of a page of completions.
pub(in crate::http) const COMPLETIONS: FieldTable = &[
    PAGE,
    &[
        Field::text("model", "Only completions with this model name."),
        Field::json("metadata[KEY]", entry_schema, "Only completions with this entry."),
    ],
];

/// The parameters of a page of messages.
pub(in crate::http) const MESSAGES: FieldTable = &[PAGE];

fn limit_schema() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})
}

fn entry_schema() -> Value {
    json!({"type": "object"})
}

/// Which page of a list, and in which order.
pub(in crate::http) struct PageQuery<'a> {
    /// The id of the entry before the page.
    pub(in crate::http) after: Option<&'a str>,
    pub(in crate::http) limit: usize,
    pub(in crate::http) newest_first: bool,
}

impl<'a> PageQuery<'a> {
    pub(in crate::http) fn read(fields: &Fields<'a>) -> Result<Self, ApiError> {
        let limit = fields.read("limit", format_args!("from 1 to {MAX_LIMIT}"), |value| {
            let limit: usize = value.as_str()?.parse().ok()?;
            (1..=MAX_LIMIT).contains(&limit).then_some(limit)
        })?;
        Ok(Self {
            after: fields.text("after")?,
            limit: limit.unwrap_or(DEFAULT_LIMIT),
            newest_first: fields.text("order")? == Some("desc"),
        })
    }
}

/// The query of a list of completions.
pub(super) struct CompletionQuery {
    pub(super) after: Option<InteractionId>,
    pub(super) limit: usize,
    pub(super) newest_first: bool,
    model: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl CompletionQuery {
    /// Reads a query. An entry of `metadata` is the parameter `metadata[KEY]`.
    pub(super) fn read(mut query: Map<String, Value>) -> Result<Self, ApiError> {
        let is_entry = |name: &str| name.starts_with(METADATA) && name.ends_with(']');
        let names: Vec<String> = query.keys().filter(|name| is_entry(name)).cloned().collect();
        let mut metadata = BTreeMap::new();
        for name in names {
            let key = name.strip_prefix(METADATA).and_then(|rest| rest.strip_suffix(']'));
            if let (Some(key), Some(Value::String(value))) = (key, query.remove(&name)) {
                metadata.insert(key.to_owned(), value);
            }
        }
        let fields = Fields::of(&query, COMPLETIONS)?;
        let PageQuery { after, limit, newest_first } = PageQuery::read(&fields)?;
        let id = |text: &str| {
            let id = InteractionId::from_completion_id(text);
            id.ok_or_else(|| invalid("after", &Value::from(text), "a completion's id"))
        };
        let model = fields.text("model")?.map(str::to_owned);
        Ok(Self { after: after.map(id).transpose()?, limit, newest_first, model, metadata })
    }

    /// Whether a completion belongs into the list.
    pub(super) fn admits(&self, interaction: &Interaction) -> bool {
        let has = |(key, value): (&String, &String)| interaction.metadata.get(key) == Some(value);
        self.model.as_ref().is_none_or(|model| *model == interaction.model)
            && self.metadata.iter().all(has)
    }
}
