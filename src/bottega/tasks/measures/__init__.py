"""What judges generated samples: pure functions of arrays, in numpy alone, so that every engine is judged alike."""
