//! How good the served policy is: held-out questions over the same HTTP as everyone's, sampled at
//! temperature 1 with fixed seeds, on a route without rewards, so that none is ever trained on.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use hone_core::types::PolicyVersion;

use super::client::{Answer, Ask, Client, ClientError};
use super::config::TASK_HELD_OUT;
use super::tally::Board;
use super::task;
use super::task::{MAX_TOKENS, Question, QuestionSplit, Questions};

/// Held-out questions of an evaluation.
pub const QUESTIONS: usize = 96;
/// Seed of the first question's sampling; the others follow.
const FIRST_SEED: u64 = 7_000_001;

/// The first `count` held-out questions, all different, the same ones every time.
pub fn held_out(count: usize) -> Vec<Question> {
    let mut seen = HashSet::new();
    Questions::new(FIRST_SEED, QuestionSplit::HeldOut)
        .filter(|question| seen.insert(*question))
        .take(count)
        .collect()
}

/// One held-out question's answer and what it earns.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The question.
    pub question: Question,
    /// What was answered.
    pub text: String,
    /// Whether the number is right.
    pub right: bool,
    /// Whether the form is kept.
    pub well_formed: bool,
    /// Of [`task::REWARD_MAX`].
    pub reward: f64,
}

/// The answers to every held-out question, in the questions' order.
#[derive(Clone, Debug, Default)]
pub struct DemoEvaluation {
    /// One for each question that was answered.
    pub answers: Vec<Judged>,
    /// The newest version that answered.
    pub version: PolicyVersion,
}

impl DemoEvaluation {
    /// Mean reward.
    pub fn reward(&self) -> f64 {
        self.mean(|judged| judged.reward)
    }

    /// Share of right answers.
    pub fn right(&self) -> f64 {
        self.mean(|judged| f64::from(u8::from(judged.right)))
    }

    /// Share of well-formed answers.
    pub fn well_formed(&self) -> f64 {
        self.mean(|judged| f64::from(u8::from(judged.well_formed)))
    }

    fn mean(&self, value: impl Fn(&Judged) -> f64) -> f64 {
        self.answers.iter().map(value).sum::<f64>() / (self.answers.len().max(1) as f64)
    }
}

/// Asks every question once, `parallel` at a time; `progress` hears how many are answered.
///
/// # Errors
/// The first failure, when no question at all is answered. Any failure is counted on the board.
pub async fn measure(
    client: &Client,
    questions: &[Question],
    parallel: usize,
    board: &Arc<Board>,
    mut progress: impl FnMut(usize),
) -> Result<DemoEvaluation, ClientError> {
    let permits = Arc::new(Semaphore::new(parallel.max(1)));
    let mut tasks = JoinSet::new();
    for (index, question) in questions.iter().enumerate() {
        let (client, permits, board) = (client.clone(), Arc::clone(&permits), Arc::clone(board));
        let ask = ask(index, question);
        tasks.spawn(async move {
            // The semaphore is never closed; without a permit the question would only be early.
            let _permit = permits.acquire().await;
            board.asked();
            (index, client.ask(&ask).await)
        });
    }
    let mut answers: Vec<Option<Answer>> = vec![None; questions.len()];
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
                board.failed(&error);
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
        _ => Ok(judge(questions, answers)),
    }
}

fn ask(index: usize, question: &Question) -> Ask {
    Ask {
        text: question.text(),
        metadata: BTreeMap::from([("task".to_owned(), TASK_HELD_OUT.to_owned())]),
        seed: FIRST_SEED + index as u64,
        max_tokens: MAX_TOKENS,
    }
}

fn judge(questions: &[Question], answers: Vec<Option<Answer>>) -> DemoEvaluation {
    let mut evaluation = DemoEvaluation::default();
    for (question, answer) in questions.iter().zip(answers) {
        let Some(answer) = answer else { continue };
        let score = task::score(&answer.text, question.answer());
        evaluation.version = evaluation.version.max(answer.version);
        evaluation.answers.push(Judged {
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
    fn held_out_questions_are_different_fixed_and_never_asked() {
        let questions = held_out(QUESTIONS);
        assert_eq!(questions, held_out(QUESTIONS));
        assert_eq!(questions.iter().collect::<HashSet<_>>().len(), QUESTIONS);
        let texts: HashSet<String> = questions.iter().map(Question::text).collect();
        let asked = Questions::new(1, QuestionSplit::Asked).take(20_000);
        assert!(asked.into_iter().all(|question| !texts.contains(&question.text())));
    }

    #[test]
    fn shares_are_over_the_answers_that_came() {
        let questions = held_out(3);
        let answer = |text: String| Answer {
            completion_id: String::new(),
            text,
            version: PolicyVersion(4),
            first_token: std::time::Duration::ZERO,
            gaps: Vec::new(),
        };
        let evaluation = judge(
            &questions,
            vec![Some(answer(questions[0].ideal())), None, Some(answer("dunno".to_owned()))],
        );
        assert_eq!((evaluation.right(), evaluation.well_formed()), (0.5, 0.5));
        assert!((evaluation.reward() - task::REWARD_MAX / 2.0).abs() < 1e-12);
        assert_eq!(evaluation.version, PolicyVersion(4));
        assert!(DemoEvaluation::default().reward().abs() < 1e-12);
    }
}
