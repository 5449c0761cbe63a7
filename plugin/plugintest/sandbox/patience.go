package sandbox

import "time"

// Patience is the longest time that a test waits for an event. Even on a slow machine, only a test
// that hangs waits so long.
const Patience = 5 * time.Minute
