//! Kinds that run programs, ask services and models, or take values from clients.
//!
//! Their implementations, with the parameters, are in modules of their own at the crate's root.

use std::sync::Arc;

use serde_json::Value;

use hone_core::config::{between, from_environment};

use crate::code::{CodeReward, PythonFunction, SyntaxReward};
use crate::feedback::FeedbackType;
use crate::grader::{Backends, Grader};
use crate::judge::{Judge, Rubric, SELF_JUDGE};
use crate::kinds::prelude::*;
use crate::remote::check_url;
use crate::webhook::Webhook;

pub use crate::code::{CodeParams, CodeSyntax, PythonParams};
pub use crate::feedback::FeedbackParams;
pub use crate::judge::JudgeParams;
pub use crate::webhook::WebhookParams;

impl Kind for FeedbackParams {
    fn check(&self) -> Checked {
        if let Some([low, high]) = self.range {
            let wrong = |allowed| Err(Problem::value("range", format!("[{low}, {high}]"), allowed));
            if self.r#type != FeedbackType::Number {
                return wrong("absent unless type = \"number\"");
            }
            if !(low.is_finite() && high.is_finite() && low < high) {
                return wrong("two finite numbers, the lesser first");
            }
        }
        self.check_ranges()
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        Ok(None)
    }
}

impl Kind for CodeSyntax {
    fn build(&self, context: &BuildContext<'_>) -> Built {
        Ok(Some(Arc::new(SyntaxReward::new(self.clone(), context.sandbox("code_syntax")?))))
    }

    fn needs_sandbox(&self) -> bool {
        true
    }
}

impl Kind for WebhookParams {
    fn check(&self) -> Checked {
        check_url("url", &self.url, self.allow_http)?;
        self.check_ranges()?;
        between("max_backoff_ms", self.max_backoff_ms, self.backoff_ms, 300_000)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let webhook = Webhook::new(self, context.route, context.part, &context.metrics()?);
        Ok(Some(Arc::new(webhook?)))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        let secret = from_environment(&self.secret_env, lookup);
        self.secret = secret.map_err(|error| format!("secret_env{error}"))?;
        Ok(())
    }
}

impl Kind for PythonParams {
    fn check(&self) -> Checked {
        let path = self.path.to_string_lossy();
        match (path.is_empty(), self.source.trim().is_empty()) {
            (true, true) => Err(Problem::new("path", " is missing: give it, or source")),
            (false, false) => {
                let allowed = "absent where source is given";
                Err(Problem::value("path", quoted(&path), allowed))
            }
            _ => self.check_ranges(),
        }
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let sandbox = context.sandbox("python")?;
        let function = PythonFunction::new(self.clone(), sandbox, context.route, context.part)?;
        Ok(Some(Arc::new(function)))
    }

    fn needs_sandbox(&self) -> bool {
        true
    }
}

impl Kind for CodeParams {
    fn check(&self) -> Checked {
        self.check_ranges()?;
        let different = |key, value: &String, others: &[&String]| match others.contains(&value) {
            true => {
                Err(Problem::value(key, quoted(value), "another key than those of other tests"))
            }
            false => Ok(()),
        };
        different("cases", &self.cases, &[&self.tests])?;
        different("calls", &self.calls, &[&self.tests, &self.cases])?;
        if self.function.trim().is_empty() {
            return Err(Problem::value("function", quoted(&self.function), "a function's name"));
        }
        Ok(())
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        Ok(Some(Arc::new(CodeReward::new(self.clone(), context.sandbox("code")?))))
    }

    fn needs_sandbox(&self) -> bool {
        true
    }

    fn reads(&self) -> Vec<String> {
        vec![self.tests.clone(), self.cases.clone()]
    }
}

impl Kind for JudgeParams {
    fn check(&self) -> Checked {
        if !self.is_self_judge() {
            check_url("base_url", &self.base_url, self.allow_http)?;
            if self.model.is_empty() {
                let allowed = "the name of a model that the endpoint serves";
                return Err(Problem::value("model", quoted(""), allowed));
            }
        }
        if (self.rubric == Rubric::Custom) == self.template.trim().is_empty() {
            let allowed = "a template with rubric = \"custom\", and empty without";
            return Err(Problem::value("template", quoted(&self.template), allowed));
        }
        let width = self.max - self.min;
        if !(self.min.is_finite() && width.is_finite() && width > 0.0) {
            let allowed = format!("a finite number above min ({})", self.min);
            return Err(Problem::value("max", self.max, &allowed));
        }
        self.check_ranges()?;
        between("max_backoff_ms", self.max_backoff_ms, self.backoff_ms, 300_000)
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let own = context.tools.self_judge.clone();
        let judge = Judge::new(self, context.route, context.part, &context.metrics()?, own);
        Ok(Some(Arc::new(judge?)))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        let key = from_environment(&self.api_key_env, lookup);
        self.api_key = key.map_err(|error| format!("api_key_env{error}"))?;
        Ok(())
    }

    // Only some rubrics compare with a reference.
    fn reads(&self) -> Vec<String> {
        Vec::new()
    }

    fn needs_self_judge(&self) -> bool {
        self.is_self_judge()
    }
}

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

fn not_a_grader(why: String) -> Problem {
    Problem::new("grader", format!(" is not a grader: {why}"))
}

impl GraderParams {
    fn read(&self, backends: Backends) -> Result<Grader, Problem> {
        let json = match &self.grader {
            Value::String(text) => {
                serde_json::from_str(text).map_err(|error| not_a_grader(error.to_string()))?
            }
            table => table.clone(),
        };
        Grader::new("grader", &json, backends).map_err(|error| not_a_grader(error.sentence()))
    }
}

impl Kind for GraderParams {
    fn build(&self, context: &BuildContext<'_>) -> Built {
        let grader = self.read(context.tools.backends())?;
        if grader.needs_code() && context.tools.sandbox.is_none() {
            return Err(not_a_grader("it runs Python, and there is no sandbox".to_owned()));
        }
        for model in grader.models() {
            context.tools.client(model).map(drop).map_err(not_a_grader)?;
        }
        Ok(Some(Arc::new(grader)))
    }

    fn needs_sandbox(&self) -> bool {
        self.read(Backends::default()).is_ok_and(|grader| grader.needs_code())
    }

    fn needs_self_judge(&self) -> bool {
        self.grader_models().iter().any(|model| model == SELF_JUDGE)
    }

    fn grader_models(&self) -> Vec<String> {
        let grader = self.read(Backends::default());
        grader.map_or_else(|_| Vec::new(), |g| g.models().into_iter().map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn python_is_found_by_type_and_not_by_word() {
        let code = json!({"type": "python", "name": "p", "source": "def grade(a, b): return 1"});
        let words = json!({
            "type": "score_model", "name": "w", "model": "self",
            "input": [{"role": "user", "content": "Is it good python?"}],
        });
        let multi = |parts| json!({"type": "multi", "graders": parts, "calculate_output": "a"});
        for (grader, found) in [
            (code.clone(), true),
            (Value::String(code.to_string()), true),
            (multi(json!({"a": words, "b": code})), true),
            (multi(json!({"a": words})), false),
            (words, false),
        ] {
            assert_eq!(GraderParams { grader: grader.clone() }.needs_sandbox(), found, "{grader}");
        }
    }
}
