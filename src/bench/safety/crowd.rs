//! Simulated users: whose turn it is, what they ask, and which ratings they post when.

use std::collections::VecDeque;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::taste::{Satisfaction, UserTaste};
use crate::demo::task::{Question, QuestionSplit, Questions};

/// Users, each with a session of their own.
const USERS: u32 = 400;
/// Messages of failures that are kept.
const FAILURES_KEPT: usize = 3;

/// How users rate answers. A user gives a thumb up with a probability equal to the satisfaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RatingHabits {
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

/// One question that a user is about to ask.
#[derive(Clone, Debug)]
pub(super) struct UserVisit {
    /// The user, below [`USERS`].
    pub user: u32,
    pub question: Question,
    /// Seed of the sampling.
    pub seed: u64,
}

/// An answer as its user saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ObservedAnswer {
    /// The policy version that generated it.
    pub version: u64,
    /// The taste of users at the time.
    pub taste: UserTaste,
    pub satisfaction: Satisfaction,
}

impl ObservedAnswer {
    /// The satisfaction of the user who got it.
    pub fn value(&self) -> f64 {
        self.satisfaction.under(self.taste)
    }
}

/// The ideal answer to 1 + 1.
#[cfg(test)]
pub(super) const IDEAL: &str = "<reasoning>2</reasoning><answer>2</answer>";

#[cfg(test)]
impl ObservedAnswer {
    /// A version's answer to 1 + 1, for users who want its form.
    pub fn to_one_and_one(version: u64, text: &str) -> Self {
        Self { version, taste: UserTaste::Form, satisfaction: Satisfaction::of(text, 2) }
    }
}

/// A rating to post.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Thumb {
    pub completion_id: String,
    pub up: bool,
}

/// What became of requests and ratings.
#[derive(Clone, Debug, Default)]
pub(super) struct CrowdCounts {
    /// Chat completions requested.
    pub requests: u64,
    /// Chat completions and ratings that failed.
    pub failed: u64,
    /// Acknowledged ratings.
    pub ratings: u64,
    /// Ratings whose acknowledgment says that they are not trained on.
    pub untrained: u64,
    /// The messages of the first failures.
    pub failures: Vec<String>,
}

/// All users. They share one stream of questions.
pub(super) struct Crowd {
    random: ChaCha8Rng,
    questions: Questions,
    habits: RatingHabits,
    /// Requests in all.
    total: u64,
    /// Number of the answer from which on users prefer [`UserTaste::Brevity`].
    change_at: Option<usize>,
    delayed: VecDeque<(usize, Thumb)>,
    pub answers: Vec<ObservedAnswer>,
    pub counts: CrowdCounts,
}

impl Crowd {
    /// Users that ask `total` questions. The same seed gives the same questions.
    pub fn new(seed: u64, total: u64, habits: RatingHabits, change_at: Option<usize>) -> Self {
        Self {
            random: ChaCha8Rng::seed_from_u64(seed),
            questions: Questions::new(seed, QuestionSplit::Asked),
            habits,
            total,
            change_at,
            delayed: VecDeque::new(),
            answers: Vec::new(),
            counts: CrowdCounts::default(),
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
        let is_changed = self.change_at.is_some_and(|at| number >= at);
        let taste = if is_changed { UserTaste::Brevity } else { UserTaste::Form };
        let satisfaction = Satisfaction::of(text, visit.question.answer());
        let answer = ObservedAnswer { version, taste, satisfaction };
        self.answers.push(answer);
        if self.random.random::<f64>() < self.habits.share {
            let up = self.thumb(visit.user, answer.value());
            self.delayed.push_back((number + self.habits.lag, Thumb { completion_id, up }));
        }
        let due = self.delayed.partition_point(|(at, _)| *at <= number);
        self.delayed.drain(..due).map(|(_, thumb)| thumb).collect()
    }

    /// Whether a user posts a thumb up for an answer.
    fn thumb(&mut self, user: u32, satisfaction: f64) -> bool {
        let content = self.random.random::<f64>() < satisfaction;
        let mistaken = self.random.random::<f64>() < self.habits.noise;
        let inverted = f64::from(user) < self.habits.inverted * f64::from(USERS);
        content ^ mistaken ^ inverted
    }

    /// Counts an acknowledged rating.
    pub fn rated(&mut self, trained: bool) {
        self.counts.ratings += 1;
        self.counts.untrained += u64::from(!trained);
    }

    /// Counts a failed request.
    pub fn failed(&mut self, message: String) {
        self.counts.failed += 1;
        if self.counts.failures.len() < FAILURES_KEPT {
            self.counts.failures.push(message);
        }
    }
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

    fn share_up(habits: RatingHabits, ideal: bool) -> f64 {
        let posted = ask(&mut Crowd::new(1, 4000, habits, None), ideal);
        posted.iter().filter(|(_, thumb)| thumb.up).count() as f64 / posted.len() as f64
    }

    #[test]
    fn inverted_raters_and_mistakes_post_the_contrary() {
        let exact = RatingHabits { noise: 0.0, ..RatingHabits::default() };
        assert_eq!([share_up(exact, true), share_up(exact, false)], [1.0, 0.0]);
        let inverted = RatingHabits { inverted: 0.3, ..exact };
        assert!((share_up(inverted, true) - 0.7).abs() < 0.03);
        assert!((share_up(inverted, false) - 0.3).abs() < 0.03);
        let noisy = RatingHabits { noise: 0.1, ..exact };
        assert!((share_up(noisy, true) - 0.9).abs() < 0.03);
    }

    #[test]
    fn a_user_is_inverted_for_good() {
        let habits = RatingHabits { inverted: 0.5, noise: 0.0, ..RatingHabits::default() };
        let mut crowd = Crowd::new(1, 1, habits, None);
        for user in 0..USERS {
            assert_eq!(crowd.thumb(user, 1.0), user >= USERS / 2, "{user}");
        }
    }

    #[test]
    fn ratings_wait_for_their_lag_in_order() {
        let habits = RatingHabits { lag: 7, ..RatingHabits::default() };
        let posted = ask(&mut Crowd::new(1, 20, habits, None), true);
        let expected: Vec<_> = (0..13).map(|of| (of + 7, of.to_string())).collect();
        let found: Vec<_> = posted.into_iter().map(|(at, t)| (at, t.completion_id)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_share_of_the_answers_is_rated() {
        let habits = RatingHabits { share: 0.02, ..RatingHabits::default() };
        let posted = ask(&mut Crowd::new(3, 10_000, habits, None), true).len();
        assert!((150..250).contains(&posted), "{posted}");
    }

    #[test]
    fn the_taste_changes_once_and_decides_the_thumbs() {
        let habits = RatingHabits { noise: 0.0, ..RatingHabits::default() };
        let mut crowd = Crowd::new(1, 900, habits, Some(300));
        let posted = ask(&mut crowd, true);
        let changed = |answer: &ObservedAnswer| answer.taste == UserTaste::Brevity;
        assert_eq!(crowd.answers.iter().position(changed), Some(300));
        assert!(crowd.answers[300..].iter().all(changed));
        assert!(posted[..300].iter().all(|(_, thumb)| thumb.up));
        let up = posted[300..].iter().filter(|(_, thumb)| thumb.up).count();
        assert!((340..460).contains(&up), "{up} of 600 long answers");
    }

    #[test]
    fn failures_are_counted_and_few_messages_are_kept() {
        let mut crowd = Crowd::new(1, 3, RatingHabits::default(), None);
        (0..9).for_each(|i| crowd.failed(i.to_string()));
        assert_eq!((crowd.counts.failed, crowd.counts.failures.len()), (9, FAILURES_KEPT));
        crowd.rated(true);
        crowd.rated(false);
        assert_eq!((crowd.counts.ratings, crowd.counts.untrained), (2, 1));
    }
}
