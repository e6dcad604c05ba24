//! Evaluation of the served policy: held-out questions over HTTP, sampled at temperature 1 with fixed
//! seeds, on a route without rewards, so that no answer is trained on.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use hone_core::types::PolicyVersion;

use super::client::{Client, ClientError, StreamedAnswer, UserRequest};
use super::config::TASK_HELD_OUT;
use super::tally::SharedTally;
use super::task;
use super::task::{MAX_TOKENS, Question, QuestionSplit, Questions};

/// Held-out questions of an evaluation.
pub const QUESTIONS: usize = 96;
/// Seed of the first question's sampling; each later question adds 1.
const FIRST_SEED: u64 = 7_000_001;

/// `count` held-out questions, all different. The same questions in every call.
pub fn held_out(count: usize) -> Vec<Question> {
    let mut seen = HashSet::new();
    Questions::new(FIRST_SEED, QuestionSplit::HeldOut)
        .filter(|question| seen.insert(*question))
        .take(count)
        .collect()
}

/// A held-out question with its scored answer.
#[derive(Clone, Debug)]
pub struct ScoredAnswer {
    /// The question.
    pub question: Question,
    /// The answer.
    pub text: String,
    /// Whether the number is right.
    pub right: bool,
    /// Whether the format is right.
    pub well_formed: bool,
    /// At most [`task::REWARD_MAX`].
    pub reward: f64,
}

/// The scored answers, in the order of the questions.
#[derive(Clone, Debug, Default)]
pub struct DemoEvaluation {
    /// Unanswered questions are missing.
    pub answers: Vec<ScoredAnswer>,
    /// The newest policy version that answered.
    pub version: PolicyVersion,
}

impl DemoEvaluation {
    /// Mean reward.
    pub fn reward(&self) -> f64 {
        self.mean(|answer| answer.reward)
    }

    /// Share of right answers.
    pub fn right(&self) -> f64 {
        self.mean(|answer| f64::from(u8::from(answer.right)))
    }

    /// Share of well-formed answers.
    pub fn well_formed(&self) -> f64 {
        self.mean(|answer| f64::from(u8::from(answer.well_formed)))
    }

    fn mean(&self, value: impl Fn(&ScoredAnswer) -> f64) -> f64 {
        self.answers.iter().map(value).sum::<f64>() / (self.answers.len().max(1) as f64)
    }
}

/// Asks every question once, `parallel` at a time. `progress` receives the number of answers.
///
/// # Errors
/// The first failure, if no question is answered. Every failure is counted in `tally`.
pub async fn measure(
    client: &Client,
    questions: &[Question],
    parallel: usize,
    tally: &Arc<SharedTally>,
    mut progress: impl FnMut(usize),
) -> Result<DemoEvaluation, ClientError> {
    let permits = Arc::new(Semaphore::new(parallel.max(1)));
    let mut tasks = JoinSet::new();
    for (index, question) in questions.iter().enumerate() {
        let (client, permits, tally) = (client.clone(), Arc::clone(&permits), Arc::clone(tally));
        let request = request(index, question);
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            tally.add_request();
            (index, client.ask(&request).await)
        });
    }
    let mut answers: Vec<Option<StreamedAnswer>> = vec![None; questions.len()];
    let mut first_error = None;
    let mut answered = 0;
    while let Some(joined) = tasks.join_next().await {
        match joined {
            Ok((index, Ok(answer))) => {
                answers[index] = Some(answer);
                answered += 1;
                progress(answered);
            }
            Ok((_, Err(error))) => {
                tally.add_failure(&error);
                first_error.get_or_insert(error);
            }
            Err(panic) => {
                first_error.get_or_insert(ClientError::Transport {
                    what: "evaluation",
                    reason: panic.to_string(),
                });
            }
        }
    }
    match first_error {
        Some(error) if answered == 0 => Err(error),
        _ => Ok(score(questions, answers)),
    }
}

fn request(index: usize, question: &Question) -> UserRequest {
    UserRequest {
        text: question.text(),
        metadata: BTreeMap::from([("task".to_owned(), TASK_HELD_OUT.to_owned())]),
        seed: FIRST_SEED + index as u64,
        max_tokens: MAX_TOKENS,
    }
}

fn score(questions: &[Question], answers: Vec<Option<StreamedAnswer>>) -> DemoEvaluation {
    let mut evaluation = DemoEvaluation::default();
    for (question, answer) in questions.iter().zip(answers) {
        let Some(answer) = answer else { continue };
        let score = task::score(&answer.text, question.answer());
        evaluation.version = evaluation.version.max(answer.version);
        evaluation.answers.push(ScoredAnswer {
            reward: score.reward(),
            right: score.numeric > 0.0,
            well_formed: score.format > 0.0,
            question: *question,
            text: answer.text,
        });
    }
    evaluation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_questions_are_distinct_fixed_and_never_asked_by_users() {
        let questions = held_out(QUESTIONS);
        assert_eq!(questions, held_out(QUESTIONS));
        assert_eq!(questions.iter().collect::<HashSet<_>>().len(), QUESTIONS);
        let texts: HashSet<String> = questions.iter().map(Question::text).collect();
        let asked = Questions::new(1, QuestionSplit::Asked).take(20_000);
        assert!(asked.into_iter().all(|question| !texts.contains(&question.text())));
    }

    #[test]
    fn shares_are_over_the_answered_questions() {
        let questions = held_out(3);
        let answer = |text: String| StreamedAnswer {
            completion_id: String::new(),
            text,
            version: PolicyVersion(4),
            first_token: std::time::Duration::ZERO,
            gaps: Vec::new(),
        };
        let evaluation = score(
            &questions,
            vec![Some(answer(questions[0].ideal())), None, Some(answer("dunno".to_owned()))],
        );
        assert_eq!((evaluation.right(), evaluation.well_formed()), (0.5, 0.5));
        assert!((evaluation.reward() - task::REWARD_MAX / 2.0).abs() < 1e-12);
        assert_eq!(evaluation.version, PolicyVersion(4));
        assert!(DemoEvaluation::default().reward().abs() < 1e-12);
    }
}
