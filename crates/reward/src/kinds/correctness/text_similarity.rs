//! `text_similarity`: compares answer and reference by a metric of texts.

use hone_core::config::describe::one_of;

use crate::kinds::prelude::*;
use crate::text::Metric;

define_kind! {
    pub struct TextSimilarity {
        /// The metric's name, one of [`Metric::ALL`].
        pub metric: String,
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "text_similarity",
    typical_weight: "1.0",
    example: "metric = \"rouge_l\"",
    formula: "similarity of the extracted answer and metadata[reference] by a metric: bleu \
              (sacrebleu), gleu and meteor (nltk, without synonyms), rouge_1 to rouge_5 and \
              rouge_l (rouge-score, F), cosine (of token counts), fuzzy_match (rapidfuzz ratio); \
              missing without a reference",
}

impl TextSimilarity {
    fn metric(&self) -> Result<Metric, Problem> {
        Metric::named(&self.metric).ok_or_else(|| {
            let allowed = one_of(&Metric::ALL.map(|(name, _)| quoted(name)));
            Problem::value("metric", quoted(&self.metric), &allowed)
        })
    }
}

impl Kind for TextSimilarity {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn check(&self) -> Checked {
        self.metric().map(drop)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (metric, reference) = (self.metric()?, self.reference.clone());
        let finder = AnswerFinder::new(&self.extract)?;
        per_sample(move |input| {
            let wanted = input.metadata.get(&reference)?;
            Some(metric.score(finder.find(&input.text).unwrap_or_default(), wanted))
        })
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
    }
}
