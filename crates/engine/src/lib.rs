//! Plan, schedule, session, generation, stats. Knows providers only by their trait.
