package sandbox

import "time"

// Patience is how long a test waits for an event. It only ends a test that hangs: no test depends on
// it, also on a machine that is ten times slower.
const Patience = 5 * time.Minute
