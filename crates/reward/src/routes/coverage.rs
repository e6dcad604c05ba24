//! Which prompts a part can score, and what the others lack.

use std::collections::BTreeMap;
use std::sync::Arc;

use hone_core::text::shortened;

use super::{RewardPart, Route};
use crate::reward_fn::{ScoreInput, score_guarded};

/// Length to which a metadata value is shortened in a reason.
const SHOWN: usize = 60;

/// Why a part has no value for a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPart {
    /// The part's name.
    pub part: String,
    /// The name of its kind.
    pub kind: &'static str,
    /// What the metadata lacks, as a phrase; `None` if that is not the reason.
    pub lacks: Option<String>,
    /// Whether a process or a service computes its values.
    pub calls_out: bool,
}

/// How many prompts a part can score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartCoverage {
    /// The part's name.
    pub part: String,
    /// The name of its kind.
    pub kind: &'static str,
    /// Number of prompts that it can score.
    pub usable: usize,
    /// The index of the first other prompt, and what that lacks.
    pub first_unusable: Option<(usize, String)>,
    /// Number of prompts whose reference earns nothing if it is the completion, although the part can score them.
    /// Of a part that a process or a service computes, none is known.
    pub unearned: usize,
    /// The index of the first of these, and the reference.
    pub first_unearned: Option<(usize, String)>,
}

impl RewardPart {
    /// What the metadata lacks for this part; `None` if it needs none, or if its value may be missing
    /// for another reason.
    fn lacks(&self, metadata: &BTreeMap<String, String>) -> Option<String> {
        let present = self.reads.iter().find_map(|key| Some((key, metadata.get(key)?)));
        match present {
            // The process or the service may have failed.
            Some(_) if self.calls_out => None,
            Some((key, value)) => {
                let value = shortened(value, SHOWN);
                Some(format!("it cannot use the metadata `{key}`, {value:?}"))
            }
            None if self.reads.is_empty() => None,
            None => {
                let keys: Vec<String> = self.reads.iter().map(|key| format!("`{key}`")).collect();
                Some(format!("there is no metadata {}", keys.join(" or ")))
            }
        }
    }
}

impl Route {
    /// Why each grader has no value, for a prompt with this metadata whose completions have no
    /// value.
    pub fn missing(&self, metadata: &BTreeMap<String, String>) -> Vec<MissingPart> {
        let graders = self.parts.iter().filter(|part| part.grader.is_some());
        let missing = graders.map(|part| MissingPart {
            part: part.name.clone(),
            kind: part.kind,
            lacks: part.lacks(metadata),
            calls_out: part.calls_out,
        });
        missing.collect()
    }

    /// The graders that need metadata, and how many of the prompts with these metadata they can
    /// score. Parts that compute in this process score an empty completion of each prompt; of the
    /// others only the presence of the metadata is checked.
    pub async fn coverage(&self, prompts: &[&BTreeMap<String, String>]) -> Vec<PartCoverage> {
        let mut all = Vec::new();
        for part in self.parts.iter().filter(|part| !part.reads.is_empty()) {
            let Some(grader) = &part.grader else { continue };
            let reference = |i: usize| {
                part.reads.iter().find_map(|key| prompts[i].get(key)).map_or("", String::as_str)
            };
            let score = async |scores_reference: bool| {
                let input = |i: usize| ScoreInput {
                    messages: Arc::default(),
                    metadata: Arc::new(prompts[i].clone()),
                    text: if scores_reference { reference(i).to_owned() } else { String::new() },
                    ids: Vec::new(),
                };
                let inputs: Vec<ScoreInput> = (0..prompts.len()).map(input).collect();
                score_guarded(grader.as_ref(), &inputs, &self.name, &part.name).await
            };
            let mut unearned = Vec::new();
            let usable: Vec<bool> = if part.calls_out {
                let has_any = |i: usize| part.reads.iter().any(|key| prompts[i].contains_key(key));
                (0..prompts.len()).map(has_any).collect()
            } else {
                let values = score(false).await;
                let earned = score(true).await;
                let is_unearned = |i: &usize| {
                    values[*i].is_some() && !reference(*i).is_empty() && earned[*i] == Some(0.0)
                };
                unearned = (0..prompts.len()).filter(is_unearned).collect();
                values.iter().map(Option::is_some).collect()
            };
            let first = usable.iter().position(|usable| !usable);
            all.push(PartCoverage {
                part: part.name.clone(),
                kind: part.kind,
                usable: usable.iter().filter(|usable| **usable).count(),
                first_unusable: first
                    .map(|index| (index, part.lacks(prompts[index]).unwrap_or_default())),
                unearned: unearned.len(),
                first_unearned: unearned
                    .first()
                    .map(|index| (*index, shortened(reference(*index), SHOWN).into_owned())),
            });
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Routes;
    use crate::routes::RouteList;

    fn route(parts: &str) -> Arc<Route> {
        let text = format!("[[route]]\nname = 'r'\nreward = [{parts}]");
        let tables: BTreeMap<String, RouteList> = toml::from_str(&text).unwrap();
        Arc::clone(Routes::new(&tables["route"]).unwrap().get("r").unwrap())
    }

    fn metadata(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[tokio::test]
    async fn coverage_counts_the_prompts_that_each_part_can_score() {
        let route = route(
            "{ name = 'number', kind = 'numeric_match' }, { name = 'text', kind = 'exact_match' }, \
             { name = 'city', kind = 'exact_match', reference = 'city' }, \
             { name = 'said', kind = 'contains', phrases = ['a'] }",
        );
        let prompts = [metadata(&[("answer", "5")]), metadata(&[("answer", "7 apples or 8")])];
        let coverage = route.coverage(&prompts.iter().collect::<Vec<_>>()).await;
        let shown: Vec<String> = coverage
            .iter()
            .map(|c| format!("{} {} {} {:?}", c.part, c.kind, c.usable, c.first_unusable))
            .collect();
        let expected = [
            r#"number numeric_match 1 Some((1, "it cannot use the metadata `answer`, \"7 apples or 8\""))"#,
            "text exact_match 2 None",
            r#"city exact_match 0 Some((0, "there is no metadata `city`"))"#,
        ];
        assert_eq!(shown, expected);
    }

    #[tokio::test]
    async fn references_that_would_earn_nothing_are_found() {
        let pattern = "extract = '<a>(.*)</a>'";
        let route = route(&format!(
            "{{ name = 'strict', kind = 'exact_match', {pattern} }}, {{ name = 'lenient', kind = 'exact_match' }}"
        ));
        let prompts = [
            metadata(&[("answer", "<a>yes</a>")]),
            metadata(&[("answer", "billing")]),
            metadata(&[]),
        ];
        let found = route.coverage(&prompts.iter().collect::<Vec<_>>()).await;
        let shown: Vec<_> =
            found.iter().map(|c| (c.part.as_str(), c.unearned, c.first_unearned.clone())).collect();
        // The first reference with its tags is not what is between them.
        let first = Some((0, "<a>yes</a>".to_owned()));
        assert_eq!(shown, [("strict", 2, first), ("lenient", 0, None)]);
    }

    #[test]
    fn a_part_without_metadata_lacks_none() {
        let route = route("{ name = 'd', kind = 'diversity' }");
        let missing = route.missing(&metadata(&[]));
        let [part] = &missing[..] else { panic!("{missing:?}") };
        assert_eq!((part.kind, &part.lacks, part.calls_out), ("diversity", &None, false));
    }
}
