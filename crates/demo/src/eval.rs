//! Evaluation of the served policy: held-out questions of both kinds over HTTP, each answered greedily and
//! sampled at temperature 1 with a fixed seed, on a route without rewards, so that no answer is trained
//! on.

use std::collections::{BTreeMap, HashSet};
use std::pin::pin;

use futures::{StreamExt as _, stream};
use serde::Serialize;

use hone_core::types::PolicyVersion;

use super::client::{Client, ClientError, StreamedAnswer, UserRequest};
use super::config::TASK_HELD_OUT;
use super::task::{self, MAX_TOKENS, Question, QuestionKind, QuestionSplit, Questions};
use super::users::SharedTally;

/// Held-out questions of each kind.
pub const QUESTIONS: usize = 96;
/// Seed of the first question's sampling; each later question adds 1.
const FIRST_SEED: u64 = 7_000_001;

/// How an answer is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decoding {
    /// The most probable token each time: what the model believes.
    Greedy,
    /// Temperature 1, as users are answered: what it believes, and how sure it is.
    Sampled,
}

/// `count` held-out questions of each kind, all different. The same questions in every call.
pub fn held_out(count: usize) -> Vec<Question> {
    let of = |kind| {
        let mut seen = HashSet::new();
        Questions::new(FIRST_SEED, QuestionSplit::HeldOut(kind))
            .filter(move |question| seen.insert(*question))
            .take(count)
    };
    of(QuestionKind::Asked).chain(of(QuestionKind::Larger)).collect()
}

/// A held-out question with its scored answer.
#[derive(Clone, Debug)]
pub struct ScoredAnswer {
    /// The question.
    pub question: Question,
    /// How the answer was decoded.
    pub decoding: Decoding,
    /// The answer.
    pub text: String,
    /// Whether the number is right.
    pub right: bool,
    /// Whether the format is right.
    pub well_formed: bool,
    /// At most [`task::REWARD_MAX`].
    pub reward: f64,
}

/// The scored answers, two for each question.
#[derive(Clone, Debug, Default)]
pub struct DemoEvaluation {
    /// In the order of the questions, greedy before sampled. Unanswered questions are missing.
    pub answers: Vec<ScoredAnswer>,
    /// The newest policy version that answered.
    pub version: PolicyVersion,
}

impl DemoEvaluation {
    /// The answers of one kind and decoding.
    pub fn of(
        &self,
        kind: QuestionKind,
        decoding: Decoding,
    ) -> impl Iterator<Item = &ScoredAnswer> {
        let chosen = move |a: &&ScoredAnswer| a.question.kind() == kind && a.decoding == decoding;
        self.answers.iter().filter(chosen)
    }

    /// The mean reward of the answers of one kind and decoding; 0 without answers.
    pub fn reward(&self, kind: QuestionKind, decoding: Decoding) -> f64 {
        let (count, sum) = self
            .of(kind, decoding)
            .fold((0_u32, 0.0), |(count, sum), answer| (count + 1, sum + answer.reward));
        sum / f64::from(count.max(1))
    }
}

/// Asks every question greedily and sampled, `parallel` requests at a time. With `store` the server may
/// record the answers. `progress` receives the number of answers.
///
/// # Errors
/// The first failure, if no question is answered. Every failure is counted in `tally`.
pub async fn measure(
    client: &Client,
    questions: &[Question],
    parallel: usize,
    store: bool,
    tally: &SharedTally,
    mut progress: impl FnMut(usize),
) -> Result<DemoEvaluation, ClientError> {
    let asked: Vec<_> = questions
        .iter()
        .flat_map(|question| [Decoding::Greedy, Decoding::Sampled].map(|d| (*question, d)))
        .collect();
    let requests = asked.iter().enumerate().map(|(index, (question, decoding))| async move {
        let request = UserRequest {
            text: question.text(),
            metadata: BTreeMap::from([("task".to_owned(), TASK_HELD_OUT.to_owned())]),
            temperature: if *decoding == Decoding::Greedy { 0.0 } else { 1.0 },
            seed: FIRST_SEED + index as u64,
            max_tokens: MAX_TOKENS,
            store,
        };
        tally.borrow_mut().requests += 1;
        (index, client.ask(&request).await)
    });
    let mut requests = pin!(stream::iter(requests).buffer_unordered(parallel.max(1)));
    let mut answers: Vec<Option<StreamedAnswer>> = vec![None; asked.len()];
    let (mut first_error, mut answered) = (None, 0);
    while let Some((index, answer)) = requests.next().await {
        match answer {
            Ok(answer) => {
                answers[index] = Some(answer);
                answered += 1;
                progress(answered);
            }
            Err(error) => {
                tally.borrow_mut().add_failure(&error);
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error {
        Some(error) if answered == 0 => Err(error),
        _ => Ok(score(&asked, answers)),
    }
}

fn score(asked: &[(Question, Decoding)], answers: Vec<Option<StreamedAnswer>>) -> DemoEvaluation {
    let mut evaluation = DemoEvaluation::default();
    for ((question, decoding), answer) in asked.iter().zip(answers) {
        let Some(answer) = answer else { continue };
        let score = task::score(&answer.text, question.answer());
        evaluation.version = evaluation.version.max(answer.version);
        evaluation.answers.push(ScoredAnswer {
            reward: score.reward(),
            right: score.numeric > 0.0,
            well_formed: score.format > 0.0,
            question: *question,
            decoding: *decoding,
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
        assert_eq!(questions.iter().collect::<HashSet<_>>().len(), 2 * QUESTIONS);
        let larger = questions.iter().filter(|q| q.kind() == QuestionKind::Larger).count();
        assert_eq!(larger, QUESTIONS);
        let texts: HashSet<String> = questions.iter().map(Question::text).collect();
        let asked = Questions::new(1, QuestionSplit::Asked).take(20_000);
        assert!(asked.into_iter().all(|question| !texts.contains(&question.text())));
    }

    #[test]
    fn unanswered_questions_are_left_out() {
        let asked: Vec<_> = held_out(1).into_iter().map(|q| (q, Decoding::Greedy)).collect();
        let answer = |text: String| StreamedAnswer {
            completion_id: String::new(),
            text,
            version: PolicyVersion(4),
            first_token: std::time::Duration::ZERO,
            gaps: Vec::new(),
        };
        let evaluation = score(&asked, vec![None, Some(answer(asked[1].0.ideal()))]);
        assert_eq!(evaluation.version, PolicyVersion(4));
        assert_eq!(evaluation.of(QuestionKind::Asked, Decoding::Greedy).count(), 0);
        assert_eq!(evaluation.of(QuestionKind::Larger, Decoding::Sampled).count(), 0);
        let found: Vec<_> = evaluation.of(QuestionKind::Larger, Decoding::Greedy).collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].right && found[0].well_formed && found[0].reward == task::REWARD_MAX);
        assert_eq!(evaluation.reward(QuestionKind::Larger, Decoding::Greedy), task::REWARD_MAX);
        assert_eq!(evaluation.reward(QuestionKind::Asked, Decoding::Greedy), 0.0);
    }
}
