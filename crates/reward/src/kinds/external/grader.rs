//! `grader`: an OpenAI grader.

use std::sync::Arc;

use serde_json::Value;

use crate::grader::Grader;
use crate::judge::SELF_JUDGE;
use crate::kinds::prelude::*;

define_kind! {
    pub struct GraderParams {
        /// The grader, as a table of OpenAI's fields or as JSON in a text.
        pub grader: Value,
    }
    kind: "grader",
    range: "the grader's",
    typical_weight: "1.0",
    example: "grader = { type = \"text_similarity\", name = \"near\", evaluation_metric = \
              \"fuzzy_match\", input = \"{{ sample.output_text }}\", reference = \"12\" }",
    formula: "an OpenAI grader (string_check, text_similarity, score_model, label_model, python, \
              multi), its JSON as a text or a table; items are the metadata",
}

impl Kind for GraderParams {
    fn build(&self, context: &BuildContext<'_>) -> Built {
        let wrong = |why: String| Problem::new("grader", format!(" is not a grader: {why}"));
        let json = match &self.grader {
            Value::String(text) => {
                serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?
            }
            table => table.clone(),
        };
        let grader = Grader::new("grader", &json, context.tools.backends());
        let grader = grader.map_err(|error| wrong(error.to_string()))?;
        if grader.needs_code() && context.tools.sandbox.is_none() {
            return Err(wrong("it runs Python, and there is no sandbox".to_owned()));
        }
        for model in self.grader_models() {
            context.tools.check_model(&model).map_err(wrong)?;
        }
        Ok(Some(Arc::new(grader)))
    }

    fn needs_sandbox(&self) -> bool {
        self.with_members().iter().any(|grader| type_of(grader) == "python")
    }

    fn needs_self_judge(&self) -> bool {
        self.grader_models().iter().any(|model| model == SELF_JUDGE)
    }

    /// The models that the grader or its members ask.
    fn grader_models(&self) -> Vec<String> {
        let asks = |grader: &&Value| ["score_model", "label_model"].contains(&type_of(grader));
        let model = |grader: &Value| Some(grader.get("model")?.as_str()?.to_owned());
        self.with_members().iter().filter(asks).filter_map(model).collect()
    }
}

impl GraderParams {
    /// The grader and, of a `multi` grader, its members.
    fn with_members(&self) -> Vec<Value> {
        let whole = match &self.grader {
            Value::String(text) => serde_json::from_str(text).unwrap_or_default(),
            grader => grader.clone(),
        };
        let mut graders: Vec<Value> = match whole.get("graders") {
            Some(Value::Object(map)) => map.values().cloned().collect(),
            Some(Value::Array(list)) => list.clone(),
            _ => Vec::new(),
        };
        graders.push(whole);
        graders
    }
}

fn type_of(grader: &Value) -> &str {
    grader.get("type").and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn python_is_found_by_type_and_not_by_word() {
        let code = json!({"type": "python", "name": "p", "source": "def grade(a, b): return 1"});
        let words = json!({"type": "score_model", "input": [{"content": "Is it good python?"}]});
        for (grader, found) in [
            (code.clone(), true),
            (Value::String(code.to_string()), true),
            (json!({"type": "multi", "graders": {"a": words, "b": code}}), true),
            (json!({"type": "multi", "graders": [words]}), false),
            (words, false),
        ] {
            assert_eq!(GraderParams { grader: grader.clone() }.needs_sandbox(), found, "{grader}");
        }
    }
}
