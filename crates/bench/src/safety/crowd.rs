//! Simulated users: whose turn it is, what they ask, and which ratings they post when.

use std::collections::VecDeque;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use hone_demo::task::{Question, QuestionSplit, Questions, REWARD_MAX, score};

/// Users, each with a session of their own.
const USERS: u32 = 400;
/// Ratings on which the trust in a learned part depends.
const LEARNED_WINDOW: u64 = 128;
/// Messages of failures that are kept.
const FAILURES_KEPT: usize = 3;

/// How users rate answers. A user gives a thumb up with a probability equal to the satisfaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RatingHabits {
    /// Share of the answers that are rated.
    pub share: f64,
    /// Answers, of all users together, between an answer and its rating.
    pub lag: usize,
    /// Share of the ratings that are mistaken: the contrary is posted.
    pub noise: f64,
    /// Share of the users who always post the contrary.
    pub inverted: f64,
}

impl Default for RatingHabits {
    fn default() -> Self {
        Self { share: 1.0, lag: 0, noise: 0.02, inverted: 0.0 }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct UserVisit {
    /// The user, below [`USERS`].
    pub user: u32,
    pub question: Question,
    pub seed: u64,
}

/// An answer as its user saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ObservedAnswer {
    pub version: u64,
    pub taste: UserTaste,
    pub satisfaction: Satisfaction,
}

impl ObservedAnswer {
    pub fn value(&self) -> f64 {
        self.satisfaction[self.taste as usize]
    }
}

/// The ideal answer to 1 + 1.
#[cfg(test)]
pub(crate) const IDEAL: &str = "<reasoning>2</reasoning><answer>2</answer>";

#[cfg(test)]
impl ObservedAnswer {
    /// A version's answer to 1 + 1, for users who want its form.
    pub fn to_one_and_one(version: u64, text: &str) -> Self {
        Self { version, taste: UserTaste::Form, satisfaction: satisfaction(text, 2) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Thumb {
    pub completion_id: String,
    pub up: bool,
}

/// What became of requests and ratings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CrowdCounts {
    pub requests: u64,
    /// Chat completions and ratings that failed.
    pub failed_requests: u64,
    pub failures: Vec<String>,
    pub ratings: u64,
    /// Ratings whose acknowledgment says that they are not trained on.
    pub ratings_not_trained: u64,
}

/// How a learned reward part reacted to a change of taste.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct LearnedTrace {
    /// Ratings from the change until the part was no longer trusted.
    pub lost_after: Option<u64>,
    /// Ratings from the change until it was trusted again.
    pub regained_after: Option<u64>,
}

/// All users. They share one stream of questions.
pub(crate) struct Crowd {
    random: ChaCha8Rng,
    questions: Questions,
    habits: RatingHabits,
    /// Requests in all.
    total: u64,
    /// What users want before and after a change, and the number of the first answer after it.
    tastes: [UserTaste; 2],
    change_at: Option<usize>,
    delayed: VecDeque<(usize, Thumb)>,
    pub answers: Vec<ObservedAnswer>,
    pub counts: CrowdCounts,
    /// Ratings before the change of taste.
    before_change: u64,
    pub learned: LearnedTrace,
}

impl Crowd {
    /// Users that ask `total` questions and, with `change_at`, change their taste. The same seed gives the same questions.
    pub fn new(
        seed: u64,
        total: u64,
        habits: RatingHabits,
        (tastes, change_at): ([UserTaste; 2], Option<usize>),
    ) -> Self {
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
            questions: Questions::new(seed, QuestionSplit::Asked),
            habits,
            total,
            tastes,
            change_at,
            delayed: VecDeque::new(),
            answers: Vec::new(),
            counts: CrowdCounts::default(),
            before_change: 0,
            learned: LearnedTrace::default(),
        }
    }

    /// Records whether the daemon trusts its learned part now.
    pub fn saw_learned(&mut self, is_trusted: bool) {
        let since = self.counts.ratings - self.before_change;
        let LearnedTrace { lost_after, regained_after } = &mut self.learned;
        match (self.change_at, lost_after.is_some()) {
            (Some(at), false) if self.answers.len() >= at && !is_trusted => {
                *lost_after = Some(since)
            }
            // Before, most of the ratings that trust depends on are of the old taste.
            (Some(_), true) if is_trusted && since >= LEARNED_WINDOW => {
                *regained_after = regained_after.or(Some(since));
            }
            _ => {}
        }
    }

    /// The next question; `None` after the last one.
    pub fn next(&mut self) -> Option<UserVisit> {
        if self.counts.requests >= self.total {
            return None;
        }
        let question = self.questions.next()?;
        self.counts.requests += 1;
        let (user, seed) = (self.random.random_range(0..USERS), self.random.random::<u32>());
        Some(UserVisit { user, question, seed: seed.into() })
    }

    /// Records an answer and returns the ratings to post now, of this answer or of earlier ones.
    pub fn answered(
        &mut self,
        visit: &UserVisit,
        completion_id: String,
        version: u64,
        text: &str,
    ) -> Vec<Thumb> {
        let number = self.answers.len();
        let taste = self.tastes[usize::from(self.is_changed())];
        let satisfaction = satisfaction(text, visit.question.answer());
        let answer = ObservedAnswer { version, taste, satisfaction };
        self.answers.push(answer);
        if self.random.random::<f64>() < self.habits.share {
            let up = self.thumb(visit.user, answer.value());
            self.delayed.push_back((number + self.habits.lag, Thumb { completion_id, up }));
        }
        let due = self.delayed.partition_point(|(at, _)| *at <= number);
        self.delayed.drain(..due).map(|(_, thumb)| thumb).collect()
    }

    /// Whether the next answer is after the change of taste.
    pub fn is_changed(&self) -> bool {
        self.change_at.is_some_and(|at| self.answers.len() >= at)
    }

    fn thumb(&mut self, user: u32, satisfaction: f64) -> bool {
        let content = self.random.random::<f64>() < satisfaction;
        let mistaken = self.random.random::<f64>() < self.habits.noise;
        let inverted = f64::from(user) < self.habits.inverted * f64::from(USERS);
        content ^ mistaken ^ inverted
    }

    pub fn rated(&mut self, trained: bool) {
        self.counts.ratings += 1;
        if !self.is_changed() {
            self.before_change = self.counts.ratings;
        }
        self.counts.ratings_not_trained += u64::from(!trained);
    }

    pub fn failed(&mut self, message: String) {
        self.counts.failed_requests += 1;
        if self.counts.failures.len() < FAILURES_KEPT {
            self.counts.failures.push(message);
        }
    }
}

// What users want of an answer, and how content they are with one.

/// Characters of a brief answer: "I think it is 98." has 17, a well-formed one 50 or more.
const BRIEF: usize = 24;

/// What users want of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UserTaste {
    /// The right sum in the form of the demo's task: reasoning and answer in their tags.
    Form,
    /// The right sum in few characters.
    Brevity,
    /// The form alone, whatever the sum is.
    Look,
    /// The right sum alone, anywhere.
    Content,
}

/// Number of tastes.
const TASTES: usize = 4;

/// The satisfaction with one answer under each taste, from 0 to 1. All are known for every answer, so
/// that versions can be compared under a taste that users had at another time.
pub(crate) type Satisfaction = [f64; TASTES];

/// The satisfaction with `text` as the answer to a question whose right answer is `sum`.
fn satisfaction(text: &str, sum: u32) -> Satisfaction {
    let scored = score(text, sum);
    let brevity = match last_number(text) == Some(sum) {
        true if text.trim().chars().count() <= BRIEF => 1.0,
        true => 2.0 / 3.0,
        false => 0.0,
    };
    let content = f64::from(u8::from(last_number(text) == Some(sum)));
    [scored.reward() / REWARD_MAX, brevity, scored.format, content]
}

/// The mean satisfaction with answers; 0 without any.
pub(crate) fn mean_of<'a>(answers: impl IntoIterator<Item = &'a ObservedAnswer>) -> Satisfaction {
    let (mut sum, mut count) = (Satisfaction::default(), 0_u32);
    for answer in answers {
        sum.iter_mut().zip(answer.satisfaction).for_each(|(sum, value)| *sum += value);
        count += 1;
    }
    sum.map(|value| value / f64::from(count.max(1)))
}

fn last_number(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).rfind(|digits| !digits.is_empty())?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every question ideally or with nothing, and returns the posted thumbs.
    fn ask(crowd: &mut Crowd, ideal: bool) -> Vec<(usize, Thumb)> {
        let mut posted = Vec::new();
        while let Some(visit) = crowd.next() {
            let number = crowd.answers.len();
            let text = if ideal { visit.question.ideal() } else { String::new() };
            let due = crowd.answered(&visit, number.to_string(), 1, &text);
            posted.extend(due.into_iter().map(|thumb| (number, thumb)));
        }
        posted
    }

    const UNCHANGED: ([UserTaste; 2], Option<usize>) =
        ([UserTaste::Form, UserTaste::Brevity], None);

    #[test]
    fn inverted_raters_and_mistakes_post_the_contrary() {
        let exact = RatingHabits { noise: 0.0, ..RatingHabits::default() };
        let inverted = RatingHabits { inverted: 0.3, ..exact };
        let noisy = RatingHabits { noise: 0.1, ..exact };
        for (habits, ideal, expected, tolerance) in [
            (exact, true, 1.0, 0.0),
            (exact, false, 0.0, 0.0),
            (inverted, true, 0.7, 0.03),
            (inverted, false, 0.3, 0.03),
            (noisy, true, 0.9, 0.03),
        ] {
            let posted = ask(&mut Crowd::new(1, 4000, habits, UNCHANGED), ideal);
            let up = posted.iter().filter(|(_, thumb)| thumb.up).count() as f64;
            let share = up / posted.len() as f64;
            assert!((share - expected).abs() <= tolerance, "{habits:?}, {ideal}: {share}");
        }
    }

    #[test]
    fn users_are_inverted_for_good_and_rate_a_share_after_their_lag() {
        let habits = RatingHabits { inverted: 0.5, noise: 0.0, ..RatingHabits::default() };
        let mut crowd = Crowd::new(1, 1, habits, UNCHANGED);
        for user in 0..USERS {
            assert_eq!(crowd.thumb(user, 1.0), user >= USERS / 2, "{user}");
        }
        let habits = RatingHabits { lag: 7, ..RatingHabits::default() };
        let posted = ask(&mut Crowd::new(1, 20, habits, UNCHANGED), true);
        let expected: Vec<_> = (0..13).map(|of| (of + 7, of.to_string())).collect();
        let found: Vec<_> = posted.into_iter().map(|(at, t)| (at, t.completion_id)).collect();
        assert_eq!(found, expected);
        let habits = RatingHabits { share: 0.02, ..RatingHabits::default() };
        let posted = ask(&mut Crowd::new(3, 10_000, habits, UNCHANGED), true).len();
        assert!((150..250).contains(&posted), "{posted}");
    }

    #[test]
    fn the_taste_changes_once_and_decides_the_thumbs() {
        let habits = RatingHabits { noise: 0.0, ..RatingHabits::default() };
        let mut crowd = Crowd::new(1, 900, habits, (UNCHANGED.0, Some(300)));
        let posted = ask(&mut crowd, true);
        let changed = |answer: &ObservedAnswer| answer.taste == UserTaste::Brevity;
        assert_eq!(crowd.answers.iter().position(changed), Some(300));
        assert!(crowd.answers[300..].iter().all(changed));
        assert!(posted[..300].iter().all(|(_, thumb)| thumb.up));
        let up = posted[300..].iter().filter(|(_, thumb)| thumb.up).count();
        assert!((340..460).contains(&up), "{up} of 600 long answers");
    }

    #[test]
    fn trust_in_a_learned_part_ends_and_returns_after_the_change() {
        let mut crowd = Crowd::new(1, 900, RatingHabits::default(), (UNCHANGED.0, Some(300)));
        let mut trust = [true, false, true, true, false, true].into_iter();
        while let Some(visit) = crowd.next() {
            let number = crowd.answers.len();
            if number.is_multiple_of(150) {
                crowd.saw_learned(trust.next().unwrap());
            }
            crowd.answered(&visit, number.to_string(), 1, "");
            crowd.rated(true);
        }
        let expected = LearnedTrace { lost_after: Some(301), regained_after: Some(451) };
        assert_eq!(crowd.learned, expected);
    }

    #[test]
    fn failures_are_counted_and_few_messages_are_kept() {
        let mut crowd = Crowd::new(1, 3, RatingHabits::default(), UNCHANGED);
        (0..9).for_each(|i| crowd.failed(i.to_string()));
        assert_eq!((crowd.counts.failed_requests, crowd.counts.failures.len()), (9, FAILURES_KEPT));
        crowd.rated(true);
        crowd.rated(false);
        assert_eq!((crowd.counts.ratings, crowd.counts.ratings_not_trained), (2, 1));
    }

    #[test]
    fn tastes_value_the_right_sum_and_their_own_form() {
        for (text, form, others) in [
            ("<reasoning>12 + 7 = 19</reasoning><answer>19</answer>", 1.0, [2.0 / 3.0, 1.0, 1.0]),
            ("<reasoning>12 + 7 = 9</reasoning><answer>9</answer>", 1.0 / 3.0, [0.0, 1.0, 0.0]),
            ("The sum is 19.", 0.0, [1.0, 0.0, 1.0]),
            ("The sum is 9.", 0.0, [0.0; 3]),
            ("99999999999999999999", 0.0, [0.0; 3]),
            ("", 0.0, [0.0; 3]),
        ] {
            let found = satisfaction(text, 19);
            assert!((found[0] - form).abs() < 1e-12, "{text}: {found:?}");
            assert_eq!(found[1..], others, "{text}");
        }
    }
}
